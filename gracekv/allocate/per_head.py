"""`per_head`: an equal share for each layer and KV head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gracekv.allocate.base import QUOTAS, Quota
from gracekv.allocate.budget import BudgetPlan


@final
@QUOTAS.register("per_head")
@dataclass(frozen=True, slots=False)
class PerHead(Quota):
    """Each (layer, KV head) holds at most its equal share, B_base // (L G), floor included.

    Source: the paper's ablation without global allocation; the rounding is ours.
    """

    def __call__(
        self, tokens: Tensor, plan: BudgetPlan, columns: Tensor | None = None
    ) -> Tensor | None:
        share = plan.base // (plan.layers * plan.heads)
        return torch.full((plan.layers, plan.heads), share, device=tokens.device)
