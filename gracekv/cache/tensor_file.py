"""A safetensors file, read into memory of its own: what becomes of the file changes nothing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gracekv.errors import SavedCacheError, ShapeError
from gracekv.prefill.capture_memory import is_out_of_memory

AGAIN = "Compress and save again."
"""How every error about a damaged file ends."""

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
# The format's own limit of a header.
_HEADER_BYTES = 100_000_000


@contextmanager
def refusing(path: Path, what: str) -> Iterator[None]:
    """Raise `SavedCacheError` for whatever plain data of a file can be wrong by in the block.

    Memory that runs out is no fault of the file, and passes.
    """
    try:
        yield
    except SavedCacheError:
        raise
    except (
        ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        if is_out_of_memory(error):
            raise
        raise SavedCacheError(
            f"{path} does not hold {what} ({type(error).__name__}: {error}). {AGAIN}"
        ) from error


class TensorFile:
    """An open safetensors file; its tensors are read one by one when they are asked for.

    No more is allocated than the file is long.

    Attributes:
        path: for errors.
        metadata: text by name.
        names: of the tensors.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Read the header of `file`; raises `SavedCacheError` if it does not describe the file."""
        self.path, self._file = path, file
        size, start = os.fstat(file.fileno()).st_size, file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _HEADER_BYTES):
            raise SavedCacheError(
                f"Cannot read the saved cache {path}: it is no safetensors file, or cut off. "
                f"{AGAIN}"
            )
        self._start = 8 + length
        with refusing(path, "a safetensors header"):
            header = json.loads(file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            if not all(isinstance(x, str) for x in self.metadata.values()):
                raise TypeError("metadata is text")
            self._places = {name: _place(facts) for name, facts in header.items()}
            end = 0
            for _, _, first, last in sorted(self._places.values(), key=lambda place: place[2:]):
                if first != end:
                    raise ValueError("tensors do not follow one another")
                end = last
        if end != size - self._start:
            raise SavedCacheError(
                f"Cannot read the saved cache {path}: {end} bytes of tensors should follow its "
                f"header, there are {size - self._start}. {AGAIN}"
            )
        self.names = frozenset(self._places)

    def tensor(self, name: str) -> Tensor:
        """The tensor [...], on the CPU; raises `SavedCacheError` if it cannot be read whole."""
        dtype, shape, first, _ = self._places[name]
        tensor = torch.empty(shape, dtype=dtype)
        into = tensor.view(-1).view(torch.uint8).numpy().data
        try:
            self._file.seek(self._start + first)
            # Buffered files read until the view is full.
            count = self._file.readinto(into)  # type: ignore[attr-defined]
        except OSError as error:
            raise SavedCacheError(f"Cannot read {self.path}: {error}. {AGAIN}") from error
        if count < len(into):
            raise SavedCacheError(
                f"Cannot read the saved cache {self.path}: it ends within {name}. {AGAIN}"
            )
        return tensor


def _place(facts: Any) -> tuple[torch.dtype, list[int], int, int]:
    """Dtype, shape, and the first byte and the one after the last, counted behind the header."""
    dtype, shape, (first, last) = _TYPES[facts["dtype"]], facts["shape"], facts["data_offsets"]
    if any(type(x) is not int or x < 0 for x in (*shape, first, last)):
        raise ShapeError(f"shape {shape} at {first} to {last}")
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ShapeError(f"{last - first} bytes for shape {shape} of {dtype}")
    return dtype, shape, first, last
