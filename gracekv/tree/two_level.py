"""`two_level`: one coarse prototype or all tokens, nothing between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from gracekv.tree.distortion import CostTable, Nodes
from gracekv.tree.refine import REFINERS, Children, Refiner


@final
@REFINERS.register("two_level")
@dataclass(frozen=True)
class TwoLevel(Refiner):
    """A root splits into all its singletons at once (the paper's ablation w/o MR).

    What that ablation does is not defined in the paper: departures 5 (ours).

    Source: the paper's ablation without multi-resolution. Ours: what its trees are, which the paper
    does not say (departures 5).

    Cost: none; n tokens are known without judging.
    """

    max_cost: ClassVar[float] = math.inf

    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        step = torch.arange(table.valid.shape[1], device=nodes.start.device)
        start = (nodes.start[:, None] + step)[table.valid]
        return Children(count=nodes.length, start=start, end=start + 1)
