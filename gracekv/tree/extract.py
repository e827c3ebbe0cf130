"""`extract`: extract the most attended token of an interval."""

from __future__ import annotations

from gracekv.tree.refine import REFINERS, RuleRefiner, SplitRule


@REFINERS.register("extract")
class Extract(RuleRefiner):
    """Salient-token extraction only, no curvature cuts.

    Source: Eq. (T9); departures 5.

    Cost: one extraction per node; a tree may be as deep as its slot is long.
    """

    def rule(self) -> SplitRule:
        return SplitRule(None, 0.0, extracts=True)
