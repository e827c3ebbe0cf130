"""`exhaustive`: every cut and every extraction is tried at every node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from gracekv.errors import ConfigError
from gracekv.tree.binary import binary_proposal
from gracekv.tree.distortion import CostTable, Nodes
from gracekv.tree.extract import extract_proposal
from gracekv.tree.refine import REFINERS, Children, Proposal, Refiner


def best_extraction(nodes: Nodes, table: CostTable) -> Proposal:
    """The extraction of highest utility over all tokens of each node; ties go to the earlier."""
    step = torch.arange(table.valid.shape[1], device=nodes.start.device)
    sides = (step > 0).long() + (step + 1 < nodes.length[:, None])
    utility = (table.whole - table.before - table.after) / sides
    best = utility.masked_fill(~table.valid, -torch.inf).max(dim=1)
    low = nodes.start + best.indices
    return Proposal(low=low, high=low + 1, utility=best.values)


@final
@REFINERS.register("exhaustive")
@dataclass(frozen=True)
class Exhaustive(Refiner):
    """The best of all cuts and all extractions (ours: free, as all ends are judged anyway).

    Floor candidates force their own extraction, as in `binary_extract`.

    Source: ours; nothing more has to be judged for it.

    Cost: looks up all n - 1 cuts and n extractions of a node among the ends that the distortion
    judged.

    Attributes:
        reward: lambda_kappa for cuts, the paper's 0.05.

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    lifts_candidates: ClassVar[bool] = True

    reward: float = 0.05

    def __post_init__(self) -> None:
        if self.reward < 0:
            raise ConfigError(f"Exhaustive takes reward >= 0; got {self.reward}.")

    @property
    def uses_curvature(self) -> bool:
        return self.reward > 0

    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        cut = binary_proposal(nodes, table, None, self.reward)
        lift = best_extraction(nodes, table)
        forced = table.hold_candidates()
        floor = extract_proposal(nodes, table)
        extracts = forced | (lift.utility > cut.utility)
        low = torch.where(extracts, torch.where(forced, floor.low, lift.low), cut.low)
        high = torch.where(extracts, torch.where(forced, floor.high, lift.high), cut.high)
        return Children.of_cuts(nodes, low, high)
