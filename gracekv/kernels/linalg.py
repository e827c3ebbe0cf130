"""Float32 matrix products at the speed of the machine.

Torch multiplies float32 matrices on CPUs with MKL, which uses half of a recent AMD core; oneDNN,
which torch ships too, uses all of it and rounds the same way (float32, no lower precision).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gracekv.undo import undone


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
    return torch.stack([linear(own, rows) for own, rows in zip(x, weight, strict=True)])


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, float32 products have float32's precision on every device.

    `torch.set_float32_matmul_precision("high")` and TF32 round factors to 10 bits, which would move
    selections. What was set is set again afterwards. It is a setting of the process: other threads
    compute at full precision meanwhile, too.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The process sets precisions by backend, which this function refuses to sum up.
        backends: list[Any] = [torch.backends.cuda.matmul]
        backends.append(getattr(torch.backends.mkldnn, "matmul", backends[0]))
        set_before = [backend.fp32_precision for backend in backends]

        def undo() -> None:
            for backend, precision in zip(backends, set_before, strict=True):
                backend.fp32_precision = precision

        with undone(undo):
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        return
    with undone(lambda: torch.set_float32_matmul_precision(before)):
        torch.set_float32_matmul_precision("highest")
        yield
