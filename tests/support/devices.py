"""A second device where there is none: tensors that say they are elsewhere, and are kept apart.

A model whose layers are spread over several GPUs breaks on any operation between two of them. On
a machine without a GPU, inside `two_devices()`, `tensor.to(ELSEWHERE)` gives a tensor with real
values whose `device` is not the CPU. An operation that mixes it with CPU tensors raises
`MixedDevicesError` where CUDA would, so that a test sees which device everything lies on. Speed
and the kernels of a real device are not imitated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ELSEWHERE = torch.device("meta")
"""Where the tensors of the second device say that they are; real "meta" tensors hold no values."""

_aten = torch.ops.aten
_COPIES = {_aten._to_copy, _aten.copy_, _aten._local_scalar_dense}
# An index may lie on the CPU while what it indexes does not.
_INDEXING = {_aten.index, _aten.index_put_, _aten.index_put, _aten._unsafe_index}


class MixedDevicesError(RuntimeError):
    """An operation was given tensors of both devices."""


class Elsewhere(Tensor):
    """A tensor of the second device.

    Attributes:
        held: the tensor [any shape] with its values, on the CPU.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=ELSEWHERE,
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def two_devices() -> Iterator[torch.device]:
    """Inside, `ELSEWHERE`, which this yields, is a second device."""
    with _Functions(), _Dispatch():  # type: ignore[no-untyped-call]
        yield ELSEWHERE


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    far = [x for x in leaves if isinstance(x, Elsewhere)]
    near = [x for x in leaves if not isinstance(x, Elsewhere)]
    packet = func.overloadpacket
    lost = [x for x in near if x.is_meta]
    if lost:
        raise MixedDevicesError(f"{func} was given a tensor whose values were lost on the way.")
    if far and any(x.ndim for x in near) and packet not in _COPIES:
        indexed = packet in _INDEXING and isinstance(args[0], Elsewhere)
        others = [args[0], *args[2:]] if indexed else leaves
        if any(isinstance(x, Tensor) and x.ndim and not isinstance(x, Elsewhere) for x in others):
            shapes = [(list(x.shape), str(x.device)) for x in leaves]
            raise MixedDevicesError(f"{func} was given tensors of both devices: {shapes}.")
    asked = kwargs.get("device")
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    owners = {id(x.held): x for x in far}

    def open_(x: Any) -> Any:
        return x.held if isinstance(x, Elsewhere) else x

    result = func(*tree_map(open_, args), **tree_map(open_, kwargs))
    away = bool(far) if asked is None else torch.device(asked) == ELSEWHERE
    if packet is _aten.copy_:
        away = isinstance(args[0], Elsewhere)

    def close(x: Any) -> Any:
        if not isinstance(x, Tensor) or not away:
            return x
        mine = owners.get(id(x))
        return Elsewhere(x) if mine is None else mine

    return tree_map(close, result)


class _Dispatch(TorchDispatchMode):
    """Catches what makes tensors on a device, and what moves them there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What bypasses the dispatcher: data that becomes a tensor, tensors that become data, and
    indices, which indexing moves to where the indexed tensor is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None:
            if args and isinstance(args[0], Elsewhere):
                return args[0].to(device)
            return func(*args, **{**kwargs, "device": "cpu"}).to(device)
        if func is Tensor.tolist and isinstance(args[0], Elsewhere):
            return args[0].held.tolist()
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], Elsewhere):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(map(_moved, index)), *args[2:])
        return func(*args, **kwargs)


def _moved(index: Any) -> Any:
    if isinstance(index, list):
        index = torch.tensor(index)
    return index.to(ELSEWHERE) if isinstance(index, Tensor) else index
