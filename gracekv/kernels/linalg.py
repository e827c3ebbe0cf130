"""Float32 matrix products at the speed of the machine.

Torch multiplies float32 matrices on CPUs with MKL, which uses half of a recent AMD core; oneDNN,
which torch ships too, uses all of it and rounds the same way (float32, no lower precision).
"""

from __future__ import annotations

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
