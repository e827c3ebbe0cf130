"""The states of layers that are not compressed, in a saved cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import ShapeError
from gracekv.prefill.kept import WITHOUT_CACHE, KeptLayer


def read_kept(
    header: Mapping[str, Any], tensors: dict[str, Tensor], devices: Sequence[torch.device]
) -> tuple[KeptLayer, ...]:
    """The states that `header` lists, each on its layer's device; taken out of `tensors`.

    Tensors have the shapes [S, ...] that `KeptLayer` describes.

    Raises `ShapeError` or `KeyError` if they are not what `write_cache` wrote.
    """
    facts = header.get("kept", [])
    if not isinstance(facts, list) or not all(isinstance(x, list) and len(x) == 3 for x in facts):
        raise ShapeError(f"kept lists number, kind and window of layers; got {facts!r}")
    states = []
    for number, kind, window in facts:
        whole = type(number) is int and 0 <= number < len(devices) and isinstance(kind, str)
        if not whole or not (window is None or (type(window) is int and window > 1)):
            raise ShapeError(f"kept lists number, kind and window of layers; got {facts!r}")
        prefix = f"kept.{number}."
        own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        if not own and kind not in WITHOUT_CACHE:
            raise KeyError(prefix)
        parts = {name.removeprefix(prefix): x.to(devices[number]) for name, x in own.items()}
        state = KeptLayer(number, kind, window, parts)
        _check(state, header["length"], len(header["padding"]))
        states.append(state)
    if [state.number for state in states] != sorted({state.number for state in states}):
        raise ShapeError(f"kept lists layers once, in order; got {facts!r}")
    return tuple(states)


def _check(state: KeptLayer, length: int, sequences: int) -> None:
    for name, tensor in state.tensors.items():
        fits = len(tensor) == sequences and tensor.is_floating_point()
        if state.window is not None:
            fits = fits and tensor.shape[2] == min(length, state.window - 1)
        if not fits or not bool(torch.isfinite(tensor).all()):
            raise ShapeError(
                f"{name} of layer {state.number} does not hold {sequences} sequences of a cache "
                f"of {length} tokens; got {tensor.dtype} {list(tensor.shape)}"
            )
