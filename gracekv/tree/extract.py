"""`extract`: lift the most attended token out of its interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gracekv.tree.distortion import IntervalTable
from gracekv.tree.refine import REFINERS, Children, Nodes, Proposal, Refiner, token_grid


def forced_nodes(nodes: Nodes, table: IntervalTable) -> Tensor:
    """bool [V]: nodes that hold a floor candidate which no ancestor has isolated."""
    return table.holds_candidate(nodes.item, nodes.start, nodes.end)


def salient_token(nodes: Nodes, table: IntervalTable) -> Tensor:
    """int64 [V]: the token to extract, relative to the slot; ties go to the earlier one.

    The floor candidate of the highest floor score if the node holds one, else the token of the
    largest mean normalised probe mass. Source: the paper, "Recursive refinement rule".
    """
    tokens, valid = token_grid(nodes)
    mass = table.masses(nodes.item, nodes.end, tokens)
    score = table.floor_scores(nodes.item, tokens)
    if score is not None:
        has_candidate = (score > -torch.inf).any(dim=1, keepdim=True)
        mass = torch.where(has_candidate, score, mass)
    mass = mass.masked_fill(~valid, -torch.inf)
    return tokens.gather(1, mass.argmax(dim=1, keepdim=True))[:, 0]


def extract_proposal(nodes: Nodes, table: IntervalTable) -> Proposal:
    """Extraction of each node's salient token: gain over 1 or 2 added entries.

    Source: the paper, Eqs. app_extract_split and app_split_choice; D of the singleton is 0.
    """
    at = salient_token(nodes, table)
    has_left, has_right = at > nodes.start, at + 1 < nodes.end
    # Where a side is empty, look up the singleton itself, whose D is 0.
    left = table.at(
        nodes.item, torch.where(has_left, nodes.start, at), torch.where(has_left, at, at + 1)
    )
    right = table.at(
        nodes.item, torch.where(has_right, at + 1, at), torch.where(has_right, nodes.end, at + 1)
    )
    gain = table.at(nodes.item, nodes.start, nodes.end) - left - right
    cost = has_left.long() + has_right.long()
    return Proposal(low=at, high=at + 1, utility=gain / cost)


@final
@REFINERS.register("extract")
@dataclass(frozen=True)
class Extract(Refiner):
    """Salient-token extraction only, no curvature cuts."""

    def __call__(self, nodes: Nodes, table: IntervalTable) -> Children:
        best = extract_proposal(nodes, table)
        return Children.of_cuts(nodes, best.low, best.high)
