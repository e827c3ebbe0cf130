"""A second device on a machine that has none: tensors whose `device` is not the CPU.

A model whose layers are spread over several GPUs breaks on any operation between two of them. On
a machine without a GPU, inside `two_devices()`, `tensor.to(SECOND_DEVICE)` gives a tensor with real
values whose `device` is not the CPU. An operation that mixes it with CPU tensors raises
`MixedDevicesError` where CUDA would for two GPUs, so a test finds every mix of devices. This
includes scalars, which CUDA reads from the CPU but not from another GPU. Speed and kernels of a
real device are not imitated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
SECOND_DEVICE = torch.device("meta")
"""The `device` of the second device's tensors; real "meta" tensors hold no values."""

_aten = torch.ops.aten
_COPIES = {_aten._to_copy, _aten.copy_, _aten._local_scalar_dense}
# An index may be on the CPU while the indexed tensor is not.
_INDEXING = {_aten.index, _aten.index_put_, _aten.index_put, _aten._unsafe_index}


class MixedDevicesError(RuntimeError):
    """An operation got tensors on both devices."""


class SecondDeviceTensor(Tensor):
    """A tensor on the second device.

    Attributes:
        held: the tensor [any shape] with its values, on the CPU.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> SecondDeviceTensor:
        layout: Any = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made: SecondDeviceTensor = Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=SECOND_DEVICE, **layout
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SecondDeviceTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def two_devices() -> Iterator[torch.device]:
    """Context in which `SECOND_DEVICE`, which it yields, is a second device."""
    with _Functions(), _Dispatch():  # type: ignore[no-untyped-call]
        yield SECOND_DEVICE


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves: list[Tensor] = []
    _changed((args, kwargs), leaves.append)
    far = [x for x in leaves if isinstance(x, SecondDeviceTensor)]
    packet = func.overloadpacket
    if any(x.is_meta for x in leaves if not isinstance(x, SecondDeviceTensor)):
        raise MixedDevicesError(f"{func} was given a tensor whose values were lost on the way.")
    indexed = packet in _INDEXING and isinstance(args[0], SecondDeviceTensor)
    others = [args[0], *args[2:]] if indexed else leaves
    mixed = any(isinstance(x, Tensor) and x.device != SECOND_DEVICE for x in others)
    if far and mixed and packet not in _COPIES:
        shapes = [(list(x.shape), str(x.device)) for x in leaves]
        raise MixedDevicesError(f"{func} was given tensors of both devices: {shapes}.")
    remote, device = bool(far), kwargs.get("device")
    if device is not None:
        kwargs, remote = {**kwargs, "device": CPU}, torch.device(device) == SECOND_DEVICE
    if packet is _aten.copy_:
        remote = isinstance(args[0], SecondDeviceTensor)
    if far:
        args, kwargs = _changed((args, kwargs), lambda x: getattr(x, "held", x))
    result = func(*args, **kwargs)
    if not remote:
        return result
    owners = {id(x.held): x for x in far}
    return _changed(result, lambda x: owners[id(x)] if id(x) in owners else SecondDeviceTensor(x))


def _changed(x: Any, change: Callable[[Tensor], Any]) -> Any:
    """`x` with all tensors in it changed; torch's own `tree_map` takes several times as long."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, tuple | list):
        return type(x)([_changed(part, change) for part in x])
    if isinstance(x, dict):
        return {name: _changed(part, change) for name, part in x.items()}
    return x


class _Dispatch(TorchDispatchMode):
    """Intercepts operations that make tensors on a device or move them there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Intercepts what bypasses the dispatcher: conversions from and to Python data, and indices,
    which indexing moves to the indexed tensor's device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None:
            if args and isinstance(args[0], SecondDeviceTensor):
                return args[0].to(device)
            return func(*args, **{**kwargs, "device": "cpu"}).to(device)
        if func is Tensor.tolist and isinstance(args[0], SecondDeviceTensor):
            return args[0].held.tolist()
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(
            args[0], SecondDeviceTensor
        ):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(map(_moved, index)), *args[2:])
        return func(*args, **kwargs)


def _moved(index: Any) -> Any:
    if isinstance(index, list):
        index = torch.tensor(index)
    return index.to(SECOND_DEVICE) if isinstance(index, Tensor) else index
