"""`midpoint`: halve every node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gracekv.tree.distortion import CostTable, Nodes
from gracekv.tree.refine import REFINERS, Children, Refiner, Rule


@final
@REFINERS.register("midpoint")
@dataclass(frozen=True)
class Midpoint(Refiner):
    """Balanced binary trees: cut at floor((a+b)/2), whatever the data say (ours, a baseline).

    Source: ours, a baseline.

    Cost: looks up one cut of a node among the ends that the distortion judged.
    """

    def rule(self) -> Rule:
        return Rule(0, 0.0, lifts=False)

    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        middle = (nodes.start + nodes.end) // 2
        return Children.of_cuts(nodes, middle, middle)
