"""`adaptive_heads`: heads of a layer compete for the layer's equal share."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from gracekv.allocate.base import QUOTAS, Quota
from gracekv.allocate.plan import BudgetPlan, equal_shares, largest_remainder
from gracekv.allocate.top_tokens import largest
from gracekv.registry import bounded


@QUOTAS.register("adaptive_heads")
class AdaptiveHeads(Quota):
    """Split a layer's budget by each head's share of its top-k, mixed with equal parts (Ada-KV).

    M is a layer's equal share without the recent windows, f_g the number of head g's tokens among
    the layer's M best (ties: the lower head, then the earlier token).

    Source: Feng et al. (2024), arXiv:2407.11550, in the form of its code, whose floor is the weight
    of the equal part. Ours: largest-remainder rounding to exactly M, ties to the lower head.

    Cost: one sort of each layer's scores.

    Attributes:
        floor: weight of the equal part (0.2, the setting recommended for grouped queries).
        rule: "mix", the official one: (1 - floor) f_g + floor M / G. "safeguard", as in other
            implementations: each head is guaranteed the share `floor` of its equal part, recent
            window included; the layer's best tokens get the rest.
    """

    compares_layers = False

    floor: float = bounded(0.2, at_least=0, at_most=1, hint="0 is all adaptive, 1 all equal.")
    rule: Literal["mix", "safeguard"] = "mix"

    def __call__(self, scores: Tensor, plan: BudgetPlan) -> Tensor | None:
        return torch.stack([self.layer(own, x, plan) for x, own in enumerate(scores)])

    def layer(self, scores: Tensor, layer: int, plan: BudgetPlan) -> Tensor:
        """int64 [G]: shares of one layer's entries from its scores [G, N]."""
        pool, share = int(equal_shares(plan)[layer].sum()), Fraction(str(self.floor))
        if self.rule == "safeguard":
            guaranteed = math.floor(share * (pool // plan.heads + plan.recent))
            # The recent window is held anyway and counts towards the guaranteed entries.
            guaranteed = max(guaranteed, int(self.floor > 0)) - plan.recent
            if guaranteed > 0:
                # The guaranteed tokens are raised above all others.
                best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :guaranteed]
                scores = scores.scatter(-1, best, torch.inf)
            return winners(scores, pool)
        equal = share * Fraction(pool, plan.heads)
        parts = [(1 - share) * won + equal for won in winners(scores, pool).tolist()]
        return torch.tensor(largest_remainder(parts, pool, plan.compressible), device=scores.device)


def winners(scores: Tensor, count: int) -> Tensor:
    """int64 [G]: how many of the `count` largest of all `scores` [G, N] are in each row.

    Ties go to the earlier row, then to the earlier column. `count` is at most G N.
    """
    return largest(scores, count).sum(dim=1)
