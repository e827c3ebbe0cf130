"""`binary`: cut in two where the trajectory turns and distortion falls."""

from __future__ import annotations

from gracekv.registry import bounded
from gracekv.tree.refine import REFINERS, RuleRefiner, SplitRule


@REFINERS.register("binary")
class Binary(RuleRefiner):
    """Curvature-aligned binary splits only, no extraction.

    Source: Eq. (T8); departures 5.

    Cost: compares at most 17 cuts per node, whose distortion is known.

    Attributes:
        candidates: number of cuts considered besides the midpoint (the paper's 16).
        reward: lambda_kappa, weight of the normalised curvature (the paper's 0.05).
    """

    candidates: int = bounded(16, at_least=0, hint="0 leaves only the midpoint.")
    reward: float = bounded(0.05, at_least=0, hint="0 ignores curvature.")

    def rule(self) -> SplitRule:
        return SplitRule(self.candidates, self.reward, extracts=False)
