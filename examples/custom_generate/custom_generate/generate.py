"""Compression of the prompt's cache for `model.generate(..., custom_generate=FOLDER, ratio=8)`."""

from typing import Any


def generate(model: Any, **arguments: Any) -> Any:
    """`model.generate` over a compressed cache; see `gracekv.generate` for its arguments."""
    import gracekv

    # None means not given.
    given = {name: value for name, value in arguments.items() if value is not None}
    for name in ("assistant_model", "stop_strings"):
        if name in given:
            raise gracekv.errors.ConfigError(
                f"custom_generate cannot use {name}. Use gracekv.compress and "
                f"result.generate({name}=...)."
            )
    given["text_streamer"] = given.pop("streamer", None)
    return model.generate(**given, custom_generate=gracekv.generate)
