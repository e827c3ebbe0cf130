"""What identifies the model and tokenizer that a prefill came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def fingerprint(model: Any, tokenizer: Any = None) -> Mapping[str, str]:
    """What identifies a model and its tokenizer: class, name, dtype, hashes of config and vocab."""
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    # What saving a model adds to its config says nothing of what it computes.
    for name in ("transformers_version", "architectures", "dtype", "name_or_path"):
        config.pop(name, None)
    marks = {
        "model_class": type(model).__name__,
        "model_name": str(getattr(model.config, "name_or_path", "")),
        "config": _digest(json.dumps(config, sort_keys=True, default=repr)),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    if hasattr(tokenizer, "get_vocab"):
        marks["tokenizer"] = tokenizer_marks(tokenizer)["tokenizer"]
    return marks


def tokenizer_marks(tokenizer: Any) -> dict[str, str]:
    """Hashes of a tokenizer's vocabulary, if it tells it, and of its chat template."""
    marks = {"chat_template": _digest(repr(getattr(tokenizer, "chat_template", None)))}
    if hasattr(tokenizer, "get_vocab"):
        marks["tokenizer"] = _digest(repr(sorted(tokenizer.get_vocab().items())))
    return marks


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
