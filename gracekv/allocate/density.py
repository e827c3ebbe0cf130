"""`density`: layers share by how evenly their heads spread attention over the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from gracekv.allocate.base import QUOTAS, Quota
from gracekv.allocate.plan import BudgetPlan, equal_parts, largest_remainder
from gracekv.registry import bounded


@QUOTAS.register("density")
class Density(Quota):
    """A softmax over layers gives more to those whose heads spread attention evenly (D2O).

    With v_h the variance of head h's column sums over all prompt positions, min-max normalised over
    the heads of its layer, F_l their mean and w = softmax(-F) over layers, layer l's share of the
    whole budget is B w_l. Heads of a layer share equally.

    Source: Wan et al. (2024), D2O, arXiv:2406.13035, in the form of its code (without the
    normalisation over heads, the softmax gives most of the budget to one layer). Ours: a layer gets
    at least one entry per head on top of its recent windows (if the budget is that large) and at
    most all of its context, the difference is redistributed in proportion, rounding is by largest
    remainder to exactly B, and no layer is exempt.

    Cost: the total attention received by each position: another attention pass, a third of a
    prefill at 4,096 tokens on a CPU, unless the scorer has computed it.

    Attributes:
        epsilon: added to the denominator of the normalisation (1e-6 as in the code).
    """

    uses_column_sums = True

    epsilon: float = bounded(1e-6, above=0, hint="It keeps a denominator from 0; D2O's is 1e-6.")

    def weights(self, columns: Tensor) -> Tensor:
        """w [L] float64, which sums to 1, from column sums [L, H, T]."""
        spread = columns.double().var(dim=-1)
        low, high = spread.amin(dim=1, keepdim=True), spread.amax(dim=1, keepdim=True)
        return torch.softmax(-((spread - low) / (high - low + self.epsilon)).mean(dim=1), dim=0)

    def __call__(self, scores: Tensor, plan: BudgetPlan) -> Tensor:
        """Caps [L, G] that add up to B_base, from column sums [L, H, T]."""
        recent, most = plan.heads * plan.recent, plan.heads * plan.compressible
        least = plan.heads if plan.base >= plan.layers * plan.heads else 0
        weights = [Fraction(weight) for weight in self.weights(scores).tolist()]
        whole = proportional(weights, plan.total, recent + least, recent + most)
        layers = largest_remainder([share - recent for share in whole], plan.base, most)
        return equal_parts(layers, plan.heads).to(scores.device)


def proportional(weights: Sequence[Fraction], total: int, least: int, most: int) -> list[Fraction]:
    """Real shares clamp(x w_i, least, most), with the x for which they add up to `total`.

    `weights` are positive, and `total` is between n `least` and n `most` for n weights.
    """
    shares: dict[int, Fraction] = {}
    while len(shares) < len(weights):
        free = [i for i in range(len(weights)) if i not in shares]
        scale = (total - sum(shares.values())) / sum((weights[i] for i in free), Fraction())
        ideal = {i: scale * weights[i] for i in free}
        clamped = {i: min(max(want, Fraction(least)), Fraction(most)) for i, want in ideal.items()}
        excess = sum(clamped[i] - ideal[i] for i in free)
        # Only the clamps of the side that moves more are final.
        for i in free:
            if excess == 0 or (clamped[i] - ideal[i]) * excess > 0:
                shares[i] = clamped[i]
    return [shares[i] for i in range(len(weights))]
