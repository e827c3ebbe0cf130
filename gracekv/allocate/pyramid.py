"""`pyramid`: shares that fall linearly from the first layer to the last."""

from __future__ import annotations

from fractions import Fraction

from torch import Tensor

from gracekv.allocate.base import QUOTAS, Quota
from gracekv.allocate.plan import BudgetPlan, equal_parts, largest_remainder
from gracekv.registry import bounded


@QUOTAS.register("pyramid", works_sharded=True)
class Pyramid(Quota):
    """Shares fall linearly with depth; the last layer's is 1/20 of the mean (PyramidKV).

    Per head and without the recent window, with m the mean share: the last layer gets m / beta, the
    first one 2m - m / beta, capped at N_c (the last then gets more), and the layers between are
    interpolated linearly. Heads of a layer share equally.

    Source: Cai et al. (2024), arXiv:2406.02069. Ours: exact integers by largest remainder (the
    published integer schedule overspends small budgets), ties to the lower layer and head, and the
    recent window shared by all recipes.

    Cost: none (L numbers).

    Attributes:
        beta: mean share divided by the last layer's (PyramidKV's 20).
    """

    compares_layers = False

    beta: float = bounded(20.0, at_least=1, hint="1 gives equal shares; PyramidKV's is 20.")

    def layer_shares(self, plan: BudgetPlan) -> list[Fraction]:
        """k_l: entries per head of each layer as fractions, without recent window, of mean m."""
        mean = Fraction(plan.base, plan.layers * plan.heads)
        if plan.layers == 1:
            return [mean]
        first = min(2 * mean - mean / Fraction(str(self.beta)), Fraction(plan.compressible))
        # The last layer is as far below the mean as the first is above.
        step = Fraction(2 * (first - mean), plan.layers - 1)
        return [first - layer * step for layer in range(plan.layers)]

    def __call__(self, scores: Tensor, plan: BudgetPlan) -> Tensor | None:
        wanted = [plan.heads * share for share in self.layer_shares(plan)]
        layers = largest_remainder(wanted, plan.base, plan.heads * plan.compressible)
        return equal_parts(layers, plan.heads).to(scores.device)
