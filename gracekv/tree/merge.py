r"""The prototype of an interval of tokens: the entry that a node becomes in the cache.

    k~ = R(p) mean_t k_t^o            p = round(mean_t t), on absolute positions, half to even
    v~ = sum_t w_t v_t / sum_t w_t    w_t = R_t + beta, beta = uniform_base * mean_t R_t
    m  = clamp(n coh^2, 1, n)         coh = |mean_t k_t^o| / mean_t |k_t^o|

with k^o the key before rotation. A singleton is its original pair at its own position, m = 1.
Source: Eqs. (T1), (T2), (T3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.kernels.ragged import offsets
from gracekv.kernels.rope import Rope
from gracekv.registry import Configurable, bounded


@dataclass(frozen=True, slots=True)
class PrototypeRule(Configurable):
    """How tokens are merged, both for distortion and for packing.

    Attributes:
        uniform_base: share of uniform weight in the value prototype (beta_v; the paper's 0.1).
        epsilon: added to the denominators of coherence and value weights (ours, 1e-12: R^tok sums
            to 1 over all of a head's tokens, so the paper's usual 1e-6 would shrink values).
        multiplicity: add log m_eff to the logit (the paper); False omits it (ours, for ablation).
    """

    uniform_base: float = bounded(0.1, at_least=0)
    epsilon: float = bounded(1e-12, at_least=1e-20, hint="It keeps denominators from 0.")
    multiplicity: bool = True

    def multiplicities(self, mean_norm: Tensor, norm_mean: Tensor, count: Tensor) -> Tensor:
        """m_eff of intervals, elementwise.

        Args:
            mean_norm: |mean_t k_t^o|, [...].
            norm_mean: mean_t |k_t^o|, [...].
            count: n, tokens in the interval, [...].
        """
        if not self.multiplicity:
            return torch.ones_like(mean_norm)
        coherence = mean_norm / (norm_mean + self.epsilon)
        return torch.minimum((count * coherence.square()).clamp(min=1.0), count)


def representative_positions(start: Tensor, end: Tensor) -> Tensor:
    """p_v, int64 [V]: the mean of the absolute positions from start to end, rounded half to even.

    `start` and `end` are int64 [V], `end` exclusive.
    """
    total = start + end - 1
    half = total // 2
    return half + (total % 2) * (half % 2)


@dataclass(frozen=True, slots=True, eq=False)
class Prototypes:
    """Merged entries, one per row.

    Attributes:
        keys: [V, d] float32, rotated to `positions`.
        values: [V, d] float32.
        positions: int64 [V] absolute.
        multiplicity: m_eff [V] float32.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    multiplicity: Tensor


def merge(
    keys: Tensor, values: Tensor, scores: Tensor, node: Tensor, at: Tensor, start: Tensor,
    end: Tensor, rope: Rope, rule: PrototypeRule
) -> Prototypes:  # fmt: skip
    """Prototypes of V intervals whose tokens are consecutive in the inputs.

    Args:
        keys: [M, d] float32 post-RoPE, M = sum of the intervals' lengths, in their order.
        values: [M, d] float32.
        scores: R^tok [M] float32.
        node: int64 [M], the interval of each token.
        at: int64 [M], its absolute position.
        start: int64 [V] absolute first position of each interval.
        end: int64 [V] exclusive.
        rope: the rotations of the absolute positions.
        rule: how to merge.
    """
    count = end - start
    bounds = offsets(count)

    def total(x: Tensor) -> Tensor:
        # With lengths instead of offsets, a GPU would compute the bounds each time.
        return torch.segment_reduce(x, "sum", offsets=bounds, axis=0, unsafe=True)

    size = count.float()
    unrotated = rope.unrotate(keys, at)
    mean_key = total(unrotated) / size[:, None]
    norm_mean = total(unrotated.norm(dim=-1)) / size
    positions = representative_positions(start, end)

    weight = scores + (rule.uniform_base * total(scores) / size)[node]
    # Intervals whose scores are all 0 are merged evenly, not to 0.
    weights = total(weight)
    weighs = weights > 0
    weight = torch.where(weighs[node], weight, 1.0)
    weights = torch.where(weighs, weights, size) + rule.epsilon
    return Prototypes(
        keys=rope.rotate(mean_key, positions),
        values=total(weight[:, None] * values) / weights[:, None],
        positions=positions,
        multiplicity=rule.multiplicities(mean_key.norm(dim=-1), norm_mean, size),
    )
