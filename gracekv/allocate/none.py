"""`none`: no floor."""

from __future__ import annotations

from torch import Tensor

from gracekv.allocate.base import FLOORS, Floor, Frontier
from gracekv.allocate.plan import BudgetPlan
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.tree.base import Forest


@FLOORS.register("none", works_sharded=True)
class NoFloor(Floor):
    """Protect nothing: the whole budget goes to the auction.

    Source: the paper's ablation without the singleton floor (alpha = 0).

    Cost: none.
    """

    def candidates(
        self, scores: Tensor, plan: BudgetPlan, shard: HeadShard = WHOLE
    ) -> Tensor | None:
        return None

    def realize(
        self, forest: Forest, candidates: Tensor | None, plan: BudgetPlan, quota: Tensor | None
    ) -> Frontier:
        return Frontier.empty(forest, plan.base)
