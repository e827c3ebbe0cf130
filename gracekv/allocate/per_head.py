"""`per_head`: an equal share for each layer and KV head."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.allocate.base import QUOTAS, Quota
from gracekv.allocate.plan import BudgetPlan, equal_shares


@QUOTAS.register("per_head", works_sharded=True)
class PerHead(Quota):
    """Each (layer, KV head) holds at most its equal share, B_base // (L G), floor included.

    Source: the paper's ablation without global allocation. Ours: the remainder is dropped.

    Cost: none.

    Attributes:
        remainder: give the remainder of the division to the first heads, one entry each, so that
            the shares add up to B_base (ours: published methods then spend the same budget).
    """

    compares_layers = False
    monotone = True

    remainder: bool = False

    def __call__(self, scores: Tensor, plan: BudgetPlan) -> Tensor | None:
        if self.remainder:
            return equal_shares(plan)
        return torch.full((plan.layers, plan.heads), plan.base // (plan.layers * plan.heads))
