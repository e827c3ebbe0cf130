"""Float32 products, capped logits and their softmax, running sums.

torch multiplies float32 matrices on CPUs with MKL, which uses half of a recent AMD core; oneDNN,
which torch also ships, uses all of it with the same rounding (float32, no lower precision).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gracekv.kernels.uploads import upload


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T: [M, K] and [N, K] to [M, N], in the dtype of both.

    Float32 on a CPU goes through oneDNN if this torch has it; everything else uses torch's own
    product. Source: ours.
    """
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    if plain and len(x) > 1 and torch.backends.mkldnn.is_available():
        fused = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
        if fused is not None:
            product: Tensor = fused(x, weight, None, "none", [], "")
            return product
    return torch.nn.functional.linear(x, weight)


def batched_linear(x: Tensor, weight: Tensor, once: bool = False) -> Tensor:
    """x W^T of each head: [G, M, K] and [G, N, K] to [G, M, N].

    One product per head on a CPU, where `linear` is faster than a batched product; one launch on
    other devices. `once`: few other products have these sizes, for example because heads differ in
    size. Then torch's product is faster, since oneDNN compiles and caches a kernel per size.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or once:
        return x @ weight.mT
    if len(x) == 1:
        return linear(x[0], weight[0])[None]
    return torch.stack([linear(own, rows) for own, rows in zip(x, weight, strict=True)])


def transposed(x: Tensor) -> Tensor:
    """x^T [G, N, M] of x [G, M, N], as a weight of `batched_linear`; on a CPU a copy."""
    return x.mT.contiguous() if x.device.type == "cpu" else x.mT


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Replace scaled products x [..., T] by c tanh(x / c) in place, if there is a softcap c."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis, in place.

    Args:
        logits: [..., T], already capped.
        sinks: [..., 1] sink logits, which take a share of the softmax, or None.
    """
    if sinks is None:
        return torch.softmax(logits, dim=-1, out=logits)
    total = torch.logaddexp(logits.logsumexp(dim=-1, keepdim=True), sinks.to(logits))
    return logits.sub_(total).exp_()


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """`numbers` [...] in `dtype`, clamped to float16's largest number instead of inf."""
    return (numbers.clamp(-65504, 65504) if dtype == torch.float16 else numbers).to(dtype)


def running_sums(numbers: Tensor) -> Tensor:
    """Running sums of floats [...] over the last axis, on their device.

    Computed on the CPU: a GPU's sums are not reproducible, and `torch.use_deterministic_algorithms`
    rejects them.
    """
    return upload(numbers.cpu().cumsum(-1), numbers.device)


class Columns(NamedTuple):
    """The arguments of `softmax_sums.softmax_columns`, on the keys' device.

    Attributes:
        queries: [H, Q, d].
        keys: [G, T, d].
        seen: int64 [Q].
        weights: float32 [Q].
        scale: factor of the logits.
        power: exponent of the probabilities, at least 1.
        maximum: reduce over queries with the maximum instead of the sum.
        sinks: float32 [H, Q], or None.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor
    weights: Tensor
    scale: float
    power: float
    maximum: bool
    sinks: Tensor | None

    @property
    def scaled(self) -> Tensor:
        """float32 [H, Q, d]: the queries times the scale."""
        queries = self.queries.float()
        return queries if self.scale == 1.0 else queries * self.scale
