"""Float32 matrix products at the speed of the machine, and small tensors that many layers read.

Torch multiplies float32 matrices on CPUs with MKL, which uses half of a recent AMD core; oneDNN,
which torch ships too, uses all of it and rounds the same way (float32, no lower precision).

Small tensors are put on a GPU once, since each upload would make the host wait. They are shared:
never write to them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T: [M, K] and [N, K] to [M, N], in the dtype of both.

    Float32 on a CPU goes through oneDNN where this torch offers it; all else is torch's own
    product. Source: ours.
    """
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    if plain and len(x) > 1 and torch.backends.mkldnn.is_available():
        fused = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
        if fused is not None:
            product: Tensor = fused(x, weight, None, "none", [], "")
            return product
    return torch.nn.functional.linear(x, weight)


def batched_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of each head: [G, M, K] and [G, N, K] to [G, M, N].

    One product a head on a CPU, where `linear` is faster than a batched product; one launch on
    other devices.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return x @ weight.mT
    if len(x) == 1:
        return linear(x[0], weight[0])[None]
    return torch.stack([linear(own, rows) for own, rows in zip(x, weight, strict=True)])


def transposed(x: Tensor) -> Tensor:
    """x^T [G, N, M] of x [G, M, N], as `batched_linear` wants its weight: on a CPU a copy."""
    return x.mT.contiguous() if x.device.type == "cpu" else x.mT


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor [...] on `device`; what was put on a GPU lately is not copied again."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    data = values.contiguous().numpy().tobytes()
    return _uploaded(data, values.dtype, tuple(values.shape), device, stream_of(device))


def filled(size: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [size] of one value; on a GPU it is made once for all callers."""
    if device.type != "cuda":
        return torch.full((size,), value, dtype=dtype, device=device)
    return _filled(size, value, dtype, device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """A GPU's current stream, or 0: another stream would not wait until a tensor is written."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


@functools.lru_cache(maxsize=64)
def _uploaded(
    data: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, stream: int
) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape).to(device)


@functools.lru_cache(maxsize=64)
def _filled(
    size: int, value: float, dtype: torch.dtype, device: torch.device, stream: int
) -> Tensor:
    return torch.full((size,), value, dtype=dtype, device=device)
