"""`exhaustive`: every cut and every extraction is tried at every node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from gracekv.errors import ConfigError
from gracekv.tree.binary import binary_proposal
from gracekv.tree.distortion import IntervalTable
from gracekv.tree.extract import extract_proposal, forced_nodes
from gracekv.tree.refine import REFINERS, Children, Nodes, Proposal, Refiner, token_grid


def best_extraction(nodes: Nodes, table: IntervalTable) -> Proposal:
    """The extraction of highest utility over all tokens of each node; ties go to the earlier."""
    tokens, valid = token_grid(nodes)
    item, start, end = nodes.item[:, None], nodes.start[:, None], nodes.end[:, None]
    has_left, has_right = tokens > start, tokens + 1 < end
    left = table.at(
        item, torch.where(has_left, start, tokens), torch.where(has_left, tokens, tokens + 1)
    )
    right = table.at(
        item, torch.where(has_right, tokens + 1, tokens), torch.where(has_right, end, tokens + 1)
    )
    whole = table.at(nodes.item, nodes.start, nodes.end)[:, None]
    gain = whole - left - right
    utility = gain / (has_left.long() + has_right.long())
    best = utility.masked_fill(~valid, -torch.inf).argmax(dim=1, keepdim=True)
    at = tokens.gather(1, best)[:, 0]
    return Proposal(low=at, high=at + 1, utility=utility.gather(1, best)[:, 0])


@final
@REFINERS.register("exhaustive")
@dataclass(frozen=True)
class Exhaustive(Refiner):
    """The best of all cuts and all extractions (ours: free once the interval table exists).

    Floor candidates force their own extraction, as in `binary_extract`.

    Attributes:
        reward: lambda_kappa for cuts, the paper's 0.05.
    """

    reward: float = 0.05

    def __post_init__(self) -> None:
        if self.reward < 0:
            raise ConfigError(f"Exhaustive takes reward >= 0; got {self.reward}.")

    @property
    def uses_curvature(self) -> bool:
        return self.reward > 0

    def __call__(self, nodes: Nodes, table: IntervalTable) -> Children:
        cut = binary_proposal(nodes, table, None, self.reward)
        lift = best_extraction(nodes, table)
        forced = forced_nodes(nodes, table)
        floor = extract_proposal(nodes, table)
        extracts = forced | (lift.utility > cut.utility)
        low = torch.where(extracts, torch.where(forced, floor.low, lift.low), cut.low)
        high = torch.where(extracts, torch.where(forced, floor.high, lift.high), cut.high)
        return Children.of_cuts(nodes, low, high)
