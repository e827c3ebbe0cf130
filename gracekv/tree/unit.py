"""`unit`: a covered slot is worth 1, resolution nothing; the auction becomes a top-k on worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from gracekv.tree.context import TreeContext
from gracekv.tree.distortion import (
    DISTORTIONS,
    Distortion,
    DistortionEvaluator,
    IntervalCosts,
    Nodes,
)
from gracekv.tree.items import Items
from gracekv.tree.workspace import Workspace


class UnitEvaluator(DistortionEvaluator):
    """Nothing is distorted, everything dropped costs 1."""

    def __init__(self, items: Items) -> None:
        self._items = items

    def __call__(self, nodes: Nodes) -> IntervalCosts:
        width = int(nodes.length.max())
        step = torch.arange(width, device=nodes.item.device)
        token = nodes.start[:, None] + torch.minimum(step, nodes.length[:, None] - 1)
        items = self._items
        rows = items.head(nodes.item)[:, None]
        mass = items.scores[rows, items.offset(nodes.item[:, None], token)].float()
        sides = mass.new_zeros(2, *mass.shape)
        return IntervalCosts(sides=sides, mass=mass, drop=torch.ones_like(mass[:, 0]))


@final
@DISTORTIONS.register("unit")
@dataclass(frozen=True)
class Unit(Distortion):
    """D = 0 and D^drop = 1: rank by worth alone (score-based eviction).

    Source: ours, so that eviction methods are states of the same trees. Token worth stands in for
    the probe mass that picks extraction positions.

    Cost: none; no tensor of K or V is read.
    """

    def evaluator(
        self, context: TreeContext, layers: Sequence[int], items: Items, space: Workspace
    ) -> UnitEvaluator:
        return UnitEvaluator(items)
