"""`two_level`: one coarse prototype or all tokens, nothing in between."""

from __future__ import annotations

import math

from gracekv.kernels.ragged import rows_and_steps
from gracekv.tree.base import Children, Nodes
from gracekv.tree.refine import REFINERS, CostTable, Refiner


@REFINERS.register("two_level")
class TwoLevel(Refiner):
    """A root splits into all its singletons at once (the paper's ablation w/o MR).

    Source: the paper's ablation without multi-resolution. Ours: the shape of its trees, which the
    paper does not specify (departures 5).

    Cost: none; single tokens have no distortion.
    """

    max_cost = math.inf

    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        node, step = rows_and_steps(nodes.length)
        start = nodes.start[node] + step
        return Children(count=nodes.length, start=start, end=start + 1)
