"""`global`: all heads share one budget. (The file has a "_" since `global` is a keyword.)"""

from __future__ import annotations

from torch import Tensor

from gracekv.allocate.base import QUOTAS, Quota
from gracekv.allocate.plan import BudgetPlan


@QUOTAS.register("global", works_sharded=True)
class Global(Quota):
    """No cap per head: layers and heads compete for one budget.

    Source: the paper's appendix on global allocation.

    Cost: none.
    """

    compares_layers = False
    monotone = True

    def __call__(self, scores: Tensor, plan: BudgetPlan) -> Tensor | None:
        return None
