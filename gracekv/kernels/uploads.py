"""Copies tensors from the host to a device, and caches small ones there.

Small tensors are copied to a GPU once, since each upload takes as long as several launches. They
are shared: never write to them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor [...] on `device`, without synchronising.

    CUDA stages pageable memory before the call returns; other devices may not.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def upload_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """CPU tensors [...] of one 8-byte dtype on `device`, copied together."""
    # Triton recompiles kernels for addresses that are not multiples of 16 bytes.
    pieces = [y for x in tensors for y in (x.flatten(), x.new_zeros(x.numel() % 2))]
    parts = upload(torch.cat(pieces), device).split(list(map(len, pieces)))[::2]
    return [x.view(old.shape) for x, old in zip(parts, tensors, strict=True)]


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor [...] on `device`; recent copies on a GPU are reused."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    data = values.contiguous().numpy().tobytes()
    return _uploaded(data, values.dtype, tuple(values.shape), device, stream_of(device))


def filled(size: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [size] of one value; on a GPU it is shared by all callers."""
    if device.type != "cuda":
        return torch.full((size,), value, dtype=dtype, device=device)
    return _filled(size, value, dtype, device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """A GPU's current stream, or 0: other streams would not wait until a tensor is written."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


@functools.lru_cache(maxsize=64)
def _uploaded(
    data: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, stream: int
) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device=device)
    return upload(torch.frombuffer(bytearray(data), dtype=dtype).view(shape), device)


@functools.lru_cache(maxsize=64)
def _filled(n: int, value: float, dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    return torch.full((n,), value, dtype=dtype, device=device)
