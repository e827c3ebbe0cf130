"""A packed cache as one safetensors file: tensors, and a header that describes them.

The file's metadata holds the header as JSON, with the format's version, the checksum of every
tensor, and its own checksum. Nothing in a file is executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gracekv.cache.base import PARTS, RaggedLayer
from gracekv.cache.coded import CodedEntries, Coding
from gracekv.cache.entries import CompressedCache, LayerEntries
from gracekv.cache.layer_checks import check_codes, check_index, check_numbers
from gracekv.cache.quantised import QuantisedLayer, coded_prefixes
from gracekv.cache.saved_states import read_kept
from gracekv.errors import GracekvError, MissingDependencyError, SavedCacheError, ShapeError
from gracekv.files import replacing
from gracekv.registry import check_values

FORMAT = 4
"""Raise it when files of an older version could be misread.

Caches without quantised entries are written in format 1, those with entries of one width in format
2, those with several widths in format 3, which earlier versions read too.
"""

# What the header holds beside what `write_cache` is given.
_FIELDS = {"layers": int, "length": int, "padding": list, "sha256": dict}


def write_cache(
    path: Path, cache: CompressedCache, header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write `cache` with a `header` of plain data and more `tensors` [any shape], atomically.

    Raises `MissingDependencyError` without the safetensors package.
    """
    save_file = _safetensors().save_file
    everything = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for number, layer in enumerate(cache.layers):
        for part, tensor in layer.tensors().items():
            everything[f"layers.{number}.{part}"] = tensor.detach().cpu().contiguous()
    for state in cache.kept:
        for part, tensor in state.tensors.items():
            everything[f"kept.{state.number}.{part}"] = tensor.detach().cpu().contiguous()
    codings = cache.layers[0].codings
    described = [dataclasses.asdict(coding) for coding in codings]
    record = {
        **header,
        "layers": len(cache.layers),
        "length": cache.length,
        "padding": list(cache.padding),
        "kept": [[state.number, state.kind, state.window] for state in cache.kept],
        # Format 2 knows one coding.
        "coding": described[0] if len(described) == 1 else described or None,
        "sha256": {name: _digest(tensor) for name, tensor in everything.items()},
    }
    text = json.dumps(record, sort_keys=True)
    metadata = {
        "gracekv": text,
        "gracekv_format": str(_format(codings)),
        "gracekv_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    with replacing(path) as scratch:
        save_file(everything, scratch, metadata=metadata)


def _format(codings: Sequence[Coding]) -> int:
    """The first format that has a place for parts of these codings."""
    repeated = len({coding.bits for coding in codings}) < len(codings)
    return FORMAT if repeated else min(1 + len(codings), 3)


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
        if path.is_dir():
            raise SavedCacheError(f"{path} is a folder, not what result.save wrote.") from error
        raise SavedCacheError(f"Cannot read the saved cache {path}: {error}. {AGAIN}") from error
    if "gracekv_format" not in metadata:
        raise SavedCacheError(
            f"{path} is a safetensors file, but not a cache that gracekv saved. Write one with "
            f"result.save(path)."
        )
    if metadata["gracekv_format"] not in map(str, range(1, FORMAT + 1)):
        raise SavedCacheError(
            f"{path} has format {metadata['gracekv_format']!r}, this version of gracekv reads "
            f"formats 1 to {FORMAT}. Update gracekv, or save the cache again."
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
) -> tuple[CompressedCache, dict[str, Any], dict[str, Tensor]]:
    """The cache, each layer on its of `devices`, with header and further tensors (on the CPU).

    `devices` are those of all layers of the model, compressed or not.

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
    layers = []
    try:
        padding, length = _whole(header["padding"]), header["length"]
        codings, kept = _codings(header.get("coding")), read_kept(header, tensors, devices)
        others = {state.number for state in kept if not state.beside_entries}
        if header["layers"] + len(others) != len(devices):
            raise SavedCacheError(
                f"{path} holds {header['layers'] + len(others)} layers, the model has "
                f"{len(devices)}. Load it with the model that it was saved from."
            )
        own_devices = [device for x, device in enumerate(devices) if x not in others]
        for number, device in enumerate(own_devices):
            prefix = f"layers.{number}."
            own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
            parts = {name.removeprefix(prefix): tensor for name, tensor in own.items()}
            layers.append(_layer(parts, codings, length, len(padding), device))
        cache = CompressedCache(tuple(layers), length, padding, kept)
    except SavedCacheError:
        raise
    except (GracekvError, KeyError, TypeError) as error:
        raise SavedCacheError(f"{path} does not hold a whole cache: {error}. {AGAIN}") from error
    return cache, header, tensors


def _codings(facts: Any) -> tuple[Coding, ...]:
    """The codings that a header describes; raises `ConfigError` or `TypeError` if it is none."""
    found = []
    for own in facts if isinstance(facts, list) else [] if facts is None else [facts]:
        check_values(Coding, own)
        coding = Coding(**own)
        if coding.bits not in (4, 8) or coding.group < 1:
            raise ShapeError(f"codes have 4 or 8 bits and groups of at least 1; got {coding}")
        found.append(coding)
    return tuple(found)


def _layer(
    parts: Mapping[str, Tensor],
    codings: tuple[Coding, ...],
    length: int,
    sequences: int,
    device: torch.device,
) -> LayerEntries:
    """The layer of `parts`; raises `ShapeError` or `KeyError` if they do not make one."""
    exact = {part: parts[part] for part in PARTS}
    check_index(exact, length)
    check_numbers(exact)
    there = {
        name: tensor if "offsets" in name else tensor.to(device) for name, tensor in parts.items()
    }
    layer = RaggedLayer(**{part: there[part] for part in PARTS}, sequences=sequences)
    if not codings:
        return layer
    coded = []
    for prefix, coding in zip(coded_prefixes(codings), codings, strict=True):
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in there.items()
            if name.startswith(prefix)
        }
        check_index(own, length)
        check_codes(own, layer.dtype)
        coded.append(CodedEntries.of_tensors(own, coding, sequences))
    return QuantisedLayer(layer, tuple(coded))


def _whole(numbers: list[Any]) -> tuple[int, ...]:
    if not numbers or any(type(number) is not int for number in numbers):
        raise ShapeError(f"padding takes whole numbers, at least one; got {numbers!r}")
    return tuple(numbers)


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
