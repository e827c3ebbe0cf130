"""Compression of the prompt's cache for `model.generate(..., custom_generate=FOLDER, ratio=8)`."""

import inspect
from typing import Any


def generate(*inputs: Any, model: Any, **arguments: Any) -> Any:
    """`model.generate` over a compressed cache; see `gracekv.generate` for its arguments."""
    import gracekv

    stock = type(model).generate
    names = [*inspect.signature(stock).parameters][1:]
    given = {**dict(zip(names, inputs, strict=False)), **arguments}
    # None means not given.
    given = {name: value for name, value in given.items() if value is not None}
    ours = {"ratio", "entries_per_head", "kv_bytes", "pipeline", "limit", "question_tokens"}
    own = given.get("custom_generate", gracekv.generate)
    if own is not gracekv.generate and (callable(own) or not given.keys() & ours):
        return stock(model, **given)
    # In a model's own repository, every `model.generate` is this function.
    if "generate" in vars(model) and not given.keys() & {*ours, "custom_generate"}:
        return stock(model, **given)
    for name in ("assistant_model", "stop_strings"):
        if name in given:
            raise gracekv.errors.ConfigError(
                f"custom_generate cannot use {name}. Use gracekv.compress and "
                f"result.generate({name}=...)."
            )
    given["text_streamer"] = given.pop("streamer", None)
    return stock(model, **given | {"custom_generate": gracekv.generate})
