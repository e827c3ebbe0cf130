"""`binary_extract`: the better of a curvature-aligned cut and a salient-token extraction."""

from __future__ import annotations

from gracekv.registry import bounded
from gracekv.tree.refine import REFINERS, RuleRefiner, SplitRule


@REFINERS.register("binary_extract")
class BinaryExtract(RuleRefiner):
    """Binary cut or extraction, whichever gains more per entry (the paper's).

    Floor candidates force extraction; ties go to the cut. Selection uses raw gains, which may be
    negative.

    Source: Eq. (T10); ties: departures 5.

    Cost: compares at most 17 cuts and one extraction per node, whose distortion is known.

    Attributes:
        candidates: number of cuts considered besides the midpoint (the paper's 16).
        reward: lambda_kappa, weight of the normalised curvature (the paper's 0.05).
    """

    candidates: int = bounded(16, at_least=0, hint="0 leaves only the midpoint.")
    reward: float = bounded(0.05, at_least=0, hint="0 ignores curvature.")

    def rule(self) -> SplitRule:
        return SplitRule(self.candidates, self.reward, extracts=True)
