"""What identifies the model and tokenizer that a prefill came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gracekv.distributed.sampled_weights import active_adapters, weights_digest
from gracekv.errors import CacheError

# Where the model came from may differ between machines; its computation may not.
_INFORMATIVE = ("model_name",)


def fingerprint(model: Any, tokenizer: Any = None) -> Mapping[str, str]:
    """What identifies a model and its tokenizer.

    Class, name, dtype, active adapters, a hash of the config, and one of a sample of the weights
    (see `gracekv.distributed.sampled_weights`); of a tokenizer `tokenizer_marks`. All processes of
    a sharded model call this together.
    """
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    # What saving a model adds to its config says nothing of what it computes.
    for name in ("transformers_version", "architectures", "dtype", "name_or_path"):
        config.pop(name, None)
    marks = {
        "model_class": type(model).__name__,
        "model_name": str(getattr(model.config, "name_or_path", "")),
        "config": _digest(json.dumps(config, sort_keys=True, default=repr)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "adapters": ", ".join(active_adapters(model)),
        "weights": weights_digest(model),
    }
    return marks if tokenizer is None else marks | tokenizer_marks(tokenizer)


def differences(made: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two fingerprints, as an error says it; what one lacks is left out."""
    other = sorted(x for x in made.keys() & now.keys() if made[x] != now[x])
    said = f"adapters ({made.get('adapters') or 'none'} then, {now.get('adapters') or 'none'} now)"
    return [said if x == "adapters" else x for x in other if x not in _INFORMATIVE]


def check_same_model(made: Mapping[str, str], model: Any, what: str, fix: str) -> None:
    """Raise `CacheError` if `model` is not the one that `what` was `made` by; `fix` ends it."""
    other = differences(made, fingerprint(model))
    if other:
        raise CacheError(f"{what} is of another model: {', '.join(other)} differ. {fix}")


def tokenizer_marks(tokenizer: Any) -> dict[str, str]:
    """Hashes of a tokenizer's vocabulary, if it tells it, and of its chat template."""
    marks = {"chat_template": _digest(repr(getattr(tokenizer, "chat_template", None)))}
    if hasattr(tokenizer, "get_vocab"):
        marks["tokenizer"] = _digest(repr(sorted(tokenizer.get_vocab().items())))
    return marks


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
