"""`binary_extract`: the better of a curvature-aligned cut and a salient-token extraction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from gracekv.tree.binary import binary_proposal, check_cut_fields
from gracekv.tree.distortion import CostTable, Nodes
from gracekv.tree.extract import extract_proposal
from gracekv.tree.refine import REFINERS, Children, Refiner, Rule


@final
@REFINERS.register("binary_extract")
@dataclass(frozen=True)
class BinaryExtract(Refiner):
    """Binary cut or extraction, whichever gains more per entry (the paper's).

    Floor candidates force extraction; ties go to the cut. Selection uses raw gains, which may be
    negative.

    Source: Eq. (T10); ties: departures 5.

    Cost: looks up at most 17 cuts and one extraction of a node among the ends that the distortion
    judged.

    Attributes:
        candidates: cuts considered besides the midpoint, the paper's 16.
        reward: lambda_kappa, weight of the normalised curvature, the paper's 0.05.
    """

    lifts_candidates: ClassVar[bool] = True

    candidates: int = 16
    reward: float = 0.05

    def __post_init__(self) -> None:
        check_cut_fields(self.candidates, self.reward)

    @property
    def uses_curvature(self) -> bool:
        return self.candidates > 0 or self.reward > 0

    def rule(self) -> Rule:
        return Rule(self.candidates, self.reward, lifts=True)

    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        cut = binary_proposal(nodes, table, self.candidates, self.reward)
        lift = extract_proposal(nodes, table)
        extracts = table.hold_candidates() | (lift.utility > cut.utility)
        return Children.of_cuts(
            nodes,
            torch.where(extracts, lift.low, cut.low),
            torch.where(extracts, lift.high, cut.high),
        )
