"""Checks of the tensors in a saved cache, and the states of its uncompressed layers.

These are checks that the layers' own classes do not make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from gracekv.errors import SavedCacheError, ShapeError
from gracekv.prefill.layer_state import WITHOUT_CACHE, LayerState
from gracekv.prefill.options import is_out_of_memory

AGAIN = "Compress and save again."
"""The end of every error about a damaged file."""


@contextmanager
def refusing(path: Path, what: str) -> Iterator[None]:
    """Raise `SavedCacheError` for any error in the block that a file's data can cause.

    Out-of-memory errors are not the file's fault and propagate.
    """
    try:
        yield
    except SavedCacheError:
        raise
    except (
        ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, SafetensorError,
        TypeError, ValueError,
    ) as error:  # fmt: skip
        if is_out_of_memory(error):
            raise
        raise SavedCacheError(
            f"{path} does not hold {what} ({type(error).__name__}: {error}). {AGAIN}"
        ) from error


def saved_layer_states(
    header: Mapping[str, Any], tensors: dict[str, Tensor], devices: Sequence[torch.device]
) -> tuple[LayerState, ...]:
    """The states that `header` lists, each on its layer's device; removes them from `tensors`.

    Tensors have the shapes [S, ...] that `LayerState` describes.

    Raises `ShapeError` or `KeyError` if `write_cache` did not write them.
    """
    facts = header["kept"]
    if not all(isinstance(x, list) and len(x) == 3 for x in facts):
        raise ShapeError(f"kept lists number, kind and window of layers; got {facts!r}")
    states = []
    for number, kind, window in facts:
        whole = type(number) is int and 0 <= number < len(devices) and isinstance(kind, str)
        if not whole or not (window is None or (type(window) is int and window > 1)):
            raise ShapeError(f"kept lists number, kind and window of layers; got {facts!r}")
        prefix = f"kept.{number}."
        saved = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        if not saved and kind not in WITHOUT_CACHE:
            raise KeyError(prefix)
        parts = {name.removeprefix(prefix): x.to(devices[number]) for name, x in saved.items()}
        state = LayerState(number, kind, window, parts)
        _check(state, header["length"], len(header["padding"]))
        states.append(state)
    if [state.number for state in states] != sorted({state.number for state in states}):
        raise ShapeError(f"kept lists layers once, in order; got {facts!r}")
    return tuple(states)


def _check(state: LayerState, length: int, sequences: int) -> None:
    for name, tensor in state.tensors.items():
        fits = len(tensor) == sequences and tensor.is_floating_point()
        if state.window is not None:
            fits = fits and tensor.shape[2] == min(length, state.window - 1)
        if not fits or not bool(torch.isfinite(tensor).all()):
            raise ShapeError(
                f"{name} of layer {state.number} does not hold {sequences} sequences of a cache "
                f"of {length} tokens; got {tensor.dtype} {list(tensor.shape)}"
            )


def _check_index(parts: Mapping[str, Tensor], length: int) -> None:
    """Check dtypes, offsets, positions [E] and multiplicities of a layer.

    Raises `ShapeError` unless offsets increase from 0, positions increase in each head and are
    below `length`, and multiplicities are finite.
    """
    positions, log_m, offsets = (parts[x] for x in ("positions", "log_multiplicity", "offsets"))
    types = (positions.dtype, log_m.dtype, offsets.dtype)
    if types != (torch.int32, torch.float32, torch.int64):
        raise ShapeError(f"the tensors of a layer have the types {types}")
    if offsets.ndim != 1 or len(offsets) < 2:
        raise ShapeError(f"offsets have shape {list(offsets.shape)}")
    if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
        raise ShapeError("offsets do not increase from 0")
    if len(positions) != int(offsets[-1]):
        raise ShapeError(f"{len(positions)} positions for {int(offsets[-1])} entries")
    first = torch.zeros(len(positions) + 1, dtype=torch.bool)
    first[offsets] = True
    if bool(((positions.diff() <= 0) & ~first[1:-1]).any()):
        raise ShapeError("positions do not increase in each head")
    if len(positions) and not (0 <= int(positions.min()) <= int(positions.max()) < length):
        raise ShapeError(f"positions are not below the cache's length {length}")
    _check_finite(parts, "log_multiplicity")


def check_exact(parts: Mapping[str, Tensor], length: int) -> None:
    """Raise `ShapeError` unless keys and values [E, d] share a floating dtype and are finite.

    Checks the index first, for a cache of `length` tokens.
    """
    _check_index(parts, length)
    keys, values = parts["keys"], parts["values"]
    if keys.dtype != values.dtype or not keys.is_floating_point():
        raise ShapeError(f"keys are {keys.dtype}, values {values.dtype}")
    _check_finite(parts, "keys", "values")


def check_codes(parts: Mapping[str, Tensor], length: int, dtype: torch.dtype) -> None:
    """Raise `ShapeError` unless codes [E, bytes] have finite 16-bit scales and zero points.

    `length` is as in `check_exact`, and `dtype` is that of unquantised entries.
    """
    _check_index(parts, length)
    kind = torch.float16 if dtype.itemsize > 2 else dtype
    for name in ("keys", "values"):
        types = [parts[f"{name}.{x}"].dtype for x in ("codes", "scale", "zero")]
        if types != [torch.uint8, kind, kind] or parts[f"{name}.codes"].ndim != 2:
            raise ShapeError(f"codes, scales and zero points of {name} have the types {types}")
        _check_finite(parts, f"{name}.scale", f"{name}.zero")


def _check_finite(parts: Mapping[str, Tensor], *names: str) -> None:
    for name in names:
        if not bool(parts[name].isfinite().all()):
            raise ShapeError(f"{name} hold NaN or infinity")
