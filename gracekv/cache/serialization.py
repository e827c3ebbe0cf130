"""A packed cache as one safetensors file: tensors, and a header that describes them.

The file's metadata holds the header as JSON, with the format's version, the checksum of every
tensor, and its own checksum. Nothing in a file is executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache, RaggedLayer
from gracekv.errors import GracekvError, MissingDependencyError, SavedCacheError, ShapeError
from gracekv.files import replacing

FORMAT = 1
"""Raise it when files of an older version could be misread."""

_PARTS = ("keys", "values", "positions", "log_multiplicity", "offsets")
# What the header holds beside what `write_cache` is given.
_FIELDS = {"layers": int, "length": int, "padding": list, "sha256": dict}


def write_cache(
    path: Path, cache: RaggedCache, header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write `cache` with a `header` of plain data and more `tensors` [any shape], atomically.

    Raises `MissingDependencyError` without the safetensors package.
    """
    save_file = _safetensors().save_file
    everything = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for number, layer in enumerate(cache.layers):
        for part in _PARTS:
            tensor: Tensor = getattr(layer, part)
            everything[f"layers.{number}.{part}"] = tensor.detach().cpu().contiguous()
    record = {
        **header,
        "layers": len(cache.layers),
        "length": cache.length,
        "padding": list(cache.padding),
        "sha256": {name: _digest(tensor) for name, tensor in everything.items()},
    }
    text = json.dumps(record, sort_keys=True)
    metadata = {
        "gracekv": text,
        "gracekv_format": str(FORMAT),
        "gracekv_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    with replacing(path) as scratch:
        save_file(everything, scratch, metadata=metadata)


def read_header(path: Path) -> dict[str, Any]:
    """The header alone, without the tensors.

    Raises `SavedCacheError` if the file cannot be read, is damaged, is no saved cache, or has a
    format that this version does not know.
    """
    from safetensors import SafetensorError

    open_file = _safetensors().safe_open
    try:
        with open_file(path, "pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise SavedCacheError(f"Cannot read the saved cache {path}: {error}. {AGAIN}") from error
    if "gracekv_format" not in metadata:
        raise SavedCacheError(
            f"{path} is a safetensors file, but not a cache that gracekv saved. Write one with "
            f"result.save(path)."
        )
    if metadata["gracekv_format"] != str(FORMAT):
        raise SavedCacheError(
            f"{path} has format {metadata['gracekv_format']!r}, this version of gracekv reads "
            f"format {FORMAT}. Update gracekv, or save the cache again."
        )
    text = metadata.get("gracekv", "")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get("gracekv_sha256"):
        raise SavedCacheError(f"The header of {path} is damaged (its checksum differs). {AGAIN}")
    header: dict[str, Any] = json.loads(text)
    if not isinstance(header, dict) or not all(
        isinstance(header.get(name), kind) and not isinstance(header[name], bool)
        for name, kind in _FIELDS.items()
    ):
        fields = ", ".join(f"{name} ({kind.__name__})" for name, kind in _FIELDS.items())
        raise SavedCacheError(f"The header of {path} does not hold {fields}. {AGAIN}")
    return header


def read_digest(path: Path) -> str:
    """sha256 of the header, which holds the checksum of every tensor: it identifies the file.

    Raises `SavedCacheError` as `read_header` does.
    """
    text = json.dumps(read_header(path), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_cache(
    path: Path, devices: list[torch.device]
) -> tuple[RaggedCache, dict[str, Any], dict[str, Tensor]]:
    """The cache, each layer on its of `devices`, with header and further tensors (on the CPU).

    Tensors have the shapes that they were written with; a layer's are [E, d] and [E].

    Raises `SavedCacheError` as `read_header` does, and if a tensor is missing or its checksum
    differs.
    """
    from safetensors import SafetensorError

    header = read_header(path)
    sums: dict[str, str] = header["sha256"]
    try:
        with _safetensors().safe_open(path, "pt") as file:
            missing = sorted(set(sums) ^ set(file.keys()))
            if missing:
                raise SavedCacheError(f"{path} lacks or adds {', '.join(missing[:3])}. {AGAIN}")
            tensors = {name: file.get_tensor(name) for name in sums}
    except (OSError, SafetensorError) as error:
        raise SavedCacheError(f"Cannot read the saved cache {path}: {error}. {AGAIN}") from error
    for name, tensor in tensors.items():
        if _digest(tensor) != sums[name]:
            raise SavedCacheError(f"{name} in {path} is damaged (its checksum differs). {AGAIN}")
    if header["layers"] != len(devices):
        raise SavedCacheError(
            f"{path} holds {header['layers']} layers, the model has {len(devices)}. Load it with "
            f"the model that it was saved from."
        )
    layers = []
    try:
        padding, length = _whole(header["padding"]), header["length"]
        for number, device in enumerate(devices):
            parts = {part: tensors.pop(f"layers.{number}.{part}") for part in _PARTS}
            _check_layer(parts, length)
            offsets = parts.pop("offsets")
            there = {part: tensor.to(device) for part, tensor in parts.items()}
            layers.append(RaggedLayer(**there, offsets=offsets, sequences=len(padding)))
        cache = RaggedCache(tuple(layers), length, padding)
    except (GracekvError, KeyError) as error:
        raise SavedCacheError(f"{path} does not hold a whole cache: {error}. {AGAIN}") from error
    return cache, header, tensors


def _whole(numbers: list[Any]) -> tuple[int, ...]:
    if not numbers or any(type(number) is not int for number in numbers):
        raise ShapeError(f"padding takes whole numbers, at least one; got {numbers!r}")
    return tuple(numbers)


def _check_layer(parts: Mapping[str, Tensor], length: int) -> None:
    """Raise `ShapeError` unless the tensors can be a layer over `length` tokens.

    Beyond what `RaggedLayer` checks: types, offsets that rise from 0, positions that rise in each
    head and lie below `length`, no NaN.
    """
    keys, values, positions, log_m, offsets = (parts[part] for part in _PARTS)
    types = (positions.dtype, log_m.dtype, offsets.dtype)
    if types != (torch.int32, torch.float32, torch.int64) or keys.dtype != values.dtype:
        raise ShapeError(f"the tensors of a layer have the types {keys.dtype}, {types}")
    if not keys.is_floating_point() or offsets.ndim != 1 or len(offsets) < 2:
        raise ShapeError(f"keys are {keys.dtype}, offsets have shape {list(offsets.shape)}")
    if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
        raise ShapeError("offsets do not rise from 0")
    if len(positions) != int(offsets[-1]):
        raise ShapeError(f"{len(positions)} positions for {int(offsets[-1])} entries")
    first = torch.zeros(len(positions) + 1, dtype=torch.bool)
    first[offsets] = True
    if bool(((positions.diff() <= 0) & ~first[1:-1]).any()):
        raise ShapeError("positions do not rise in each head")
    if len(positions) and not (0 <= int(positions.min()) <= int(positions.max()) < length):
        raise ShapeError(f"positions are not below the cache's length {length}")
    for part in ("keys", "values", "log_multiplicity"):
        if not bool(parts[part].isfinite().all()):
            raise ShapeError(f"{part} hold NaN or infinity")


AGAIN = "Compress and save again."
"""How every error about a damaged file ends."""


def _digest(tensor: Tensor) -> str:
    """sha256 of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    if tensor.numel():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingDependencyError(
            "Saving and loading caches needs the package 'safetensors'. Install it with: "
            "pip install 'gracekv[hf]'"
        ) from error
    return safetensors.torch
