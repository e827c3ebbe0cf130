"""`leaf_only`: a slot is kept token by token or not at all."""

from __future__ import annotations

import torch

from gracekv.tree.base import Children, Nodes
from gracekv.tree.refine import REFINERS, CostTable, Refiner


@REFINERS.register("leaf_only")
class LeafOnly(Refiner):
    """Roots stay as their original tokens, one entry each; nothing is merged (as in ChunkKV).

    Source: Liu et al. (2025), ChunkKV, arXiv:2502.00299, and all eviction of single tokens, whose
    slots have one token.

    Cost: none; nothing is split.
    """

    exact_roots = True

    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        none = torch.empty(0, dtype=torch.int64, device=nodes.tree.device)
        return Children(count=torch.zeros_like(nodes.tree), start=none, end=none)
