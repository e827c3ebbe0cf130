"""`global_mix`: all heads compete for one budget, of which a part is shared out equally."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from gracekv.allocate.adaptive_heads import AdaptiveHeads
from gracekv.allocate.base import QUOTAS, Quota
from gracekv.allocate.plan import BudgetPlan
from gracekv.registry import bounded


@QUOTAS.register("global_mix")
class GlobalMix(Quota):
    """Between `global` and `per_head`: the rules of `adaptive_heads` over the heads of all layers.

    A head that wins nothing in one top-k over all heads is left without entries, of which a fit
    could make much.

    Source: ours; the rules are those of Feng et al. (2024), arXiv:2407.11550, within a layer.

    Cost: one sort of the scores of all heads, 16 bytes a token of each meanwhile. Shares compare
    layers, so a pipeline with it keeps all layers until the last is read.

    Attributes:
        floor: weight of the equal part (ours, 0.25: tuned with `gracekv-plus`).
        rule: "safeguard": each head is guaranteed the share `floor` of its equal part, recent
            window included; the best tokens of all heads get the rest. "mix": of f tokens won in
            the common top-k and an equal part e, a head gets (1 - floor) f + floor e.
    """

    floor: float = bounded(0.25, at_least=0, at_most=1, hint="0 is all global, 1 all equal.")
    rule: Literal["mix", "safeguard"] = "safeguard"

    def __call__(self, scores: Tensor, plan: BudgetPlan) -> Tensor:
        whole = replace(plan, layers=1, heads=plan.layers * plan.heads)
        shares = AdaptiveHeads(self.floor, self.rule).layer(scores.flatten(0, 1), 0, whole)
        return shares.view(plan.layers, plan.heads)
