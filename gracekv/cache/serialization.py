"""A packed cache as one safetensors file: tensors and a header that describes them.

The file's metadata has the header as JSON, with the format version, the checksum of every tensor,
and the header's own checksum. Nothing in a file is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gracekv.cache.base import PARTS, RaggedEntries
from gracekv.cache.coded import CodedEntries, Coding
from gracekv.cache.entries import CompressedCache, LayerEntries
from gracekv.cache.quantised import QuantisedEntries, coded_prefixes
from gracekv.cache.saved_states import AGAIN, check_codes, check_exact, refusing, saved_layer_states
from gracekv.errors import SavedCacheError, ShapeError, required
from gracekv.files import VERSION, replacing
from gracekv.registry import check_values

FORMAT = 4
"""Increase it if older files could be misread. Version 0.2.0 wrote formats 1 to 4."""

# Fields that `write_cache` adds to the given header.
_FIELDS = {"layers": int, "length": int, "padding": list, "kept": list, "sha256": dict}
# How numbers of quantised entries are grouped in every file.
_GROUPED = {"keys": "channel", "values": "token"}


def write_cache(
    path: Path, cache: CompressedCache, header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write `cache` with a `header` of plain data and more `tensors` [any shape], atomically.

    Raises `MissingDependencyError` without the safetensors package, and `OutputError` like
    `gracekv.files.replacing`.
    """
    safetensors, writer = required("safetensors", "hf"), required("safetensors.torch", "hf")
    parts = {"": tensors}
    parts |= {f"layers.{number}.": layer.tensors() for number, layer in enumerate(cache.layers)}
    parts |= {f"kept.{state.number}.": state.tensors for state in cache.other_layers}
    named = {f"{prefix}{name}": x for prefix, part in parts.items() for name, x in part.items()}
    everything = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    record = {
        **header,
        "layers": len(cache.layers),
        "length": cache.length,
        "padding": list(cache.padding),
        "kept": [[state.number, state.kind, state.window] for state in cache.other_layers],
        "coding": [asdict(x) | _GROUPED for x in cache.layers[0].codings],
        "sha256": {name: _digest(tensor) for name, tensor in everything.items()},
    }
    text = json.dumps(record, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    metadata = {"gracekv": text, "gracekv_format": str(FORMAT), "gracekv_sha256": digest}
    with replacing(path) as scratch:
        try:
            writer.save_file(everything, scratch, metadata=metadata)
        except safetensors.SafetensorError as error:
            # Only its write errors can occur here.
            raise OSError(f"{error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class SavedFile:
    """An open file of `write_cache`: header and entries match even if the file is replaced.

    Attributes:
        path: for error messages.
        header: the header given to `write_cache`, and the fields that it added.
        digest: sha256 of the header, which includes the checksum of every tensor and so identifies
            the file.
    """

    path: Path
    header: dict[str, Any]
    digest: str
    _file: Any

    def read(self, devices: Sequence[torch.device]) -> tuple[CompressedCache, dict[str, Tensor]]:
        """The cache with its layers on `devices`, and the prompts' tensors [...] on the CPU.

        Layers are read one by one, so the CPU never holds more than one layer of a cache for a GPU.

        Raises `SavedCacheError` if a tensor is missing or its checksum differs, or if the model has
        a different number of layers.
        """
        header, path = self.header, self.path
        if missing := sorted(set(header["sha256"]) ^ set(self._file.keys())):
            raise SavedCacheError(f"{path} lacks or adds {', '.join(missing[:3])}. {AGAIN}")
        with refusing(path, "a whole cache"):
            padding, codings = _whole(header["padding"]), _codings(header["coding"])
            states = saved_layer_states(header, self._tensors("kept."), devices)
            others = {state.number for state in states if not state.beside_entries}
            if header["layers"] + len(others) != len(devices):
                raise SavedCacheError(
                    f"{path} holds {header['layers'] + len(others)} layers, but the model has "
                    f"{len(devices)}. Load it with the model that it was saved from."
                )
            own_devices = [device for x, device in enumerate(devices) if x not in others]
            layers = (self._layer(n, codings, device) for n, device in enumerate(own_devices))
            cache = CompressedCache(tuple(layers), header["length"], padding, states)
            return cache, self._tensors("prompts.")

    def _layer(self, index: int, codings: tuple[Coding, ...], device: torch.device) -> LayerEntries:
        """The layer with this number; raises `ShapeError` or `KeyError` if the file has none."""
        length, sequences = self.header["length"], len(self.header["padding"])
        prefix = f"layers.{index}."
        parts = {name.removeprefix(prefix): x for name, x in self._tensors(prefix).items()}
        check_exact(parts, length)
        scores = parts.get("scores")
        if scores is not None and (scores.dtype != torch.bfloat16 or not bool((scores >= 0).all())):
            raise ShapeError("scores are not bfloat16 or are negative")
        tensors = {n: x if "offsets" in n else x.to(device) for n, x in parts.items()}
        exact = {part: tensors[part] for part in PARTS}
        layer = RaggedEntries(**exact, sequences=sequences, scores=tensors.get("scores"))
        if not codings:
            return layer
        coded = []
        for prefix, coding in zip(coded_prefixes(codings), codings, strict=True):
            codes = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
            check_codes(codes, length, layer.dtype)
            coded.append(CodedEntries.of_tensors(codes, coding, sequences))
        return QuantisedEntries(layer, tuple(coded))

    def _tensors(self, prefix: str) -> dict[str, Tensor]:
        """Copies of tensors [...] by name, since the file may change after this returns.

        Raises `SavedCacheError` if a checksum differs.
        """
        tensors = {}
        for name in sorted(name for name in self._file.keys() if name.startswith(prefix)):  # noqa: SIM118
            tensors[name] = self._file.get_tensor(name).clone()
            if _digest(tensors[name]) != self.header["sha256"][name]:
                raise SavedCacheError(f"{name} in {self.path} is damaged (wrong checksum). {AGAIN}")
        return tensors


@contextmanager
def opened(path: Path) -> Iterator[SavedFile]:
    """The saved cache in `path`, open for the duration of a `with` block.

    Raises `SavedCacheError` if the file cannot be read, is damaged, is not a saved cache, or has an
    unknown format, and `MissingDependencyError` without safetensors.
    """
    safetensors = required("safetensors", "hf")
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "not a regular file"
        raise SavedCacheError(f"{path} is {kind}, not a file written by result.save.")
    try:
        # The path is opened twice, for the header and for the tensors; both must be the same file.
        before = None
        while before != (now := _identity(path)):
            before, file = now, safetensors.safe_open(path, "pt")
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        foreign = "it is not a file written by result.save" if "header too" in str(error) else error
        raise SavedCacheError(f"Cannot read the saved cache {path}: {foreign}. {AGAIN}") from error
    with file:
        metadata = file.metadata() or {}
        yield SavedFile(path, _header(path, metadata), metadata["gracekv_sha256"], file)


def _identity(path: Path) -> tuple[int, int]:
    """Numbers that change if another file replaces the path."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def read_header(path: Path) -> dict[str, Any]:
    """The header, without the tensors; raises `SavedCacheError` like `opened`."""
    with opened(path) as saved:
        return saved.header


def read_digest(path: Path) -> str:
    """`SavedFile.digest`; raises `SavedCacheError` like `opened`."""
    with opened(path) as saved:
        return saved.digest


def read_cache(
    path: Path, devices: Sequence[torch.device], digest: str | None = None
) -> CompressedCache:
    """The cache in `path` with its layers on `devices`.

    Raises `SavedCacheError` like `opened` and `SavedFile.read`, and if `digest` is given and is not
    that of the file.
    """
    with opened(path) as saved:
        if digest not in (None, saved.digest):
            raise SavedCacheError(f"{path} is not the requested file: its digest differs.")
        return saved.read(devices)[0]


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if "gracekv_format" not in metadata:
        raise SavedCacheError(
            f"{path} is a safetensors file but not a cache saved by gracekv. Write one with "
            f"result.save(path)."
        )
    if metadata["gracekv_format"] not in map(str, range(1, FORMAT + 1)):
        raise SavedCacheError(
            f"{path} has format {metadata['gracekv_format']!r}, but this version of gracekv reads "
            f"formats 1 to {FORMAT}. Update gracekv, or save the cache again."
        )
    text = metadata.get("gracekv", "")
    with refusing(path, "a header"):
        if hashlib.sha256(text.encode()).hexdigest() != metadata.get("gracekv_sha256"):
            raise SavedCacheError(f"The header of {path} is damaged: its checksum differs. {AGAIN}")
        header = json.loads(text)
        json.dumps(header.get("prompts"), allow_nan=False)  # no report can show NaN or infinity
        version = str(header.get("gracekv_version", VERSION))
        if re.match(r"0\.[01]\.", version):
            raise SavedCacheError(
                f"{path} was written by gracekv {version}, but this version reads files of 0.2.0 "
                f"and later. {AGAIN}"
            )
    if not all(type(header.get(name)) is kind for name, kind in _FIELDS.items()):
        fields = ", ".join(f"{name} ({kind.__name__})" for name, kind in _FIELDS.items())
        raise SavedCacheError(f"The header of {path} does not hold {fields}. {AGAIN}")
    return dict(header)


def _codings(facts: Any) -> tuple[Coding, ...]:
    """The codings in a header; version 0.2.0 wrote None for none, and a single one without a list.

    Raises a `ValueError` or a `TypeError` if they cannot be read.
    """
    codings = []
    for fact in facts if isinstance(facts, list) else [] if facts is None else [facts]:
        grouped = {side: fact.pop(side) for side in _GROUPED}
        check_values(Coding, fact)
        coding = Coding(**fact)
        if coding.bits not in (2, 4, 8) or coding.group < 1 or grouped != _GROUPED:
            raise ShapeError(
                f"codes have 2, 4 or 8 bits and groups of at least 1, keys by channel and values "
                f"by token; got {coding} {grouped}"
            )
        codings.append(coding)
    return tuple(codings)


def _whole(numbers: list[Any]) -> tuple[int, ...]:
    if not numbers or any(type(number) is not int for number in numbers):
        raise ShapeError(f"padding takes one or more integers; got {numbers!r}")
    return tuple(numbers)


def _digest(tensor: Tensor) -> str:
    """sha256 of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    if tensor.numel():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
