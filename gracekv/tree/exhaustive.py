"""`exhaustive`: every cut and every extraction is tried at every node."""

from __future__ import annotations

import torch

from gracekv.registry import bounded
from gracekv.tree.cost_table import CostTable
from gracekv.tree.nodes import Children, Nodes
from gracekv.tree.refine import REFINERS, Refiner
from gracekv.tree.split_rule import Proposal, best_cut, better, extraction_utilities, salient_token


@REFINERS.register("exhaustive")
class Exhaustive(Refiner):
    """The best of all cuts and all extractions (ours).

    Floor candidates force their own extraction, as in `binary_extract`.

    Source: ours; the distortion of all prefixes and suffixes of a node is computed anyway.

    Cost: compares all n - 1 cuts and n extractions of a node, whose distortion is known.

    Attributes:
        reward: lambda_kappa for cuts, the paper's 0.05.
    """

    reward: float = bounded(0.05, at_least=0, hint="0 ignores curvature.")

    @property
    def uses_curvature(self) -> bool:
        return self.reward > 0

    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        utilities = extraction_utilities(nodes, table).masked_fill(~table.valid, -torch.inf)
        best = utilities.max(dim=1)
        token = torch.where(table.holds_candidate(), salient_token(table), best.indices)
        low = nodes.start + token
        cut = best_cut(nodes, table, None, self.reward)
        return better(nodes, table, cut, Proposal(low, low + 1, best.values))
