"""Random inputs for the tree stage, and random frontiers of what it makes."""

from __future__ import annotations

import torch

from gracekv.allocate import Frontier
from gracekv.segment import Partition
from gracekv.testing.prefills import synthetic_prefill
from gracekv.tree import Forest, PrototypeRule, TreeContext


def tree_context(
    seed: int,
    *,
    layers: int = 2,
    group: int = 2,
    recent: int = 5,
    context: int = 40,
    prefix: int = 4,
    dim: int = 8,
    device: str = "cpu",
) -> TreeContext:
    """2 KV heads, up to 5 slots of uneven length (single tokens included), no floor."""
    prefill = synthetic_prefill(
        layers=layers, kv_heads=2, group=group, dim=dim, context=context, prefix=prefix, question=6,
        seed=seed, device=device,
    )  # fmt: skip
    region = prefill.spans.region(recent)
    rng = torch.Generator().manual_seed(seed)
    cuts = (torch.randperm(region.length - 1, generator=rng)[:4] + 1 + region.start).tolist()
    tokens = torch.rand(layers, 2, region.length, generator=rng) ** 4
    tokens = tokens / tokens.sum(-1, keepdim=True)
    return TreeContext(
        prefill=prefill,
        partition=Partition(torch.tensor(sorted({region.start, region.end, *cuts}))),
        scores=tokens.to(device),
        seed_scores=tokens.mean((0, 1)).to(device),
        sensitivity=(torch.rand(layers, 2, generator=rng) + 0.5).to(device),
        rule=PrototypeRule(),
        curvature=torch.rand(prefill.spans.length, generator=rng).to(device),
    )


def random_frontier(forest: Forest, seed: int) -> Frontier:
    """A legal frontier: random roots, and random splits below bought nodes."""
    rng = torch.Generator().manual_seed(seed)
    added = torch.rand(forest.trees, generator=rng) < 0.7
    wish = torch.rand(forest.nodes, generator=rng) < 0.6
    split = torch.zeros_like(wish)
    for v in range(forest.nodes):
        parent = int(forest.parent[v])
        reached = bool(added[v]) if parent < 0 else bool(split[parent])
        split[v] = reached and bool(wish[v]) and int(forest.child_count[v]) > 0
    return Frontier(forest, added, split, budget=10**6)
