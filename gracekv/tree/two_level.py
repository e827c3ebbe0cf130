"""`two_level`: one coarse prototype or all tokens, nothing between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from gracekv.tree.distortion import IntervalTable
from gracekv.tree.refine import REFINERS, Children, Nodes, Refiner, token_grid


@final
@REFINERS.register("two_level")
@dataclass(frozen=True)
class TwoLevel(Refiner):
    """A root splits into all its singletons at once (the paper's ablation w/o MR).

    What that ablation does is not defined in the paper: departures 5 (ours).
    """

    max_cost: ClassVar[float] = math.inf

    def __call__(self, nodes: Nodes, table: IntervalTable) -> Children:
        tokens, valid = token_grid(nodes)
        start = tokens[valid]
        return Children(count=nodes.length, start=start, end=start + 1)
