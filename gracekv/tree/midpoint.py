"""`midpoint`: halve every node."""

from __future__ import annotations

from gracekv.tree.refine import REFINERS, RuleRefiner
from gracekv.tree.split_rule import SplitRule


@REFINERS.register("midpoint")
class Midpoint(RuleRefiner):
    """Balanced binary trees: cut at floor((a+b)/2), whatever the data say (ours, a baseline).

    Source: ours, a baseline.

    Cost: one cut of a node, whose distortion is known.
    """

    def rule(self) -> SplitRule:
        return SplitRule(0, 0.0, extracts=False)
