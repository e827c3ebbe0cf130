"""`extract`: lift the most attended token out of its interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gracekv.tree.distortion import CostTable, Nodes
from gracekv.tree.refine import REFINERS, Children, Proposal, Refiner, Rule


def salient_token(table: CostTable) -> Tensor:
    """int64 [V]: the token to extract, counted from the node's start; ties go to the earlier one.

    The floor candidate of the highest floor score if the node holds one, else the token of the
    largest mean normalised probe mass. Source: the paper, "Recursive refinement rule".
    """
    mass, score = table.mass.double(), table.floor_scores()
    if score is not None:
        has_candidate = (score > -torch.inf).any(dim=1, keepdim=True)
        mass = torch.where(has_candidate, score, mass)
    return mass.masked_fill(~table.valid, -torch.inf).argmax(dim=1)


def extract_proposal(nodes: Nodes, table: CostTable) -> Proposal:
    """Extraction of each node's salient token: gain over 1 or 2 added entries.

    Source: Eqs. (T9) and (T10); D of the singleton is 0.
    """
    at = salient_token(table)[:, None]
    gain = (table.whole - table.before.gather(1, at) - table.after.gather(1, at))[:, 0]
    at = at[:, 0]
    sides = (at > 0).long() + (at + 1 < nodes.length)
    low = nodes.start + at
    return Proposal(low=low, high=low + 1, utility=gain / sides)


@final
@REFINERS.register("extract")
@dataclass(frozen=True)
class Extract(Refiner):
    """Salient-token extraction only, no curvature cuts.

    Source: Eq. (T9); departures 5.

    Cost: looks up one extraction of a node; a tree may get as deep as its slot is long.
    """

    lifts_candidates: ClassVar[bool] = True

    def rule(self) -> Rule:
        return Rule(None, 0.0, lifts=True)

    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        best = extract_proposal(nodes, table)
        return Children.of_cuts(nodes, best.low, best.high)
