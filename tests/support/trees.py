"""Random inputs for the tree stage, and random frontiers of its forests."""

import dataclasses
from typing import Any

import torch

from gracekv.allocate import Frontier
from gracekv.segment import Partition
from gracekv.testing.prefills import synthetic_prefill
from gracekv.tree import REFINERS, Forest, Prototype, PrototypeRule, TreeContext, build_forest
from support.splits import assert_same_tree, children_of


def tree_context(
    seed: int, *, layers: int = 2, recent: int = 5, device: str = "cpu", **sizes: Any
) -> TreeContext:
    """2 KV heads, up to 5 slots of uneven length (single tokens included), no floor."""
    sizes = {"layers": layers, "dim": 8, "context": 40, "question": 6} | sizes
    prefill = synthetic_prefill(seed=seed, device=device, **sizes)
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


def in_slots(context: TreeContext, size: int) -> TreeContext:
    """The context in slots of this many tokens; the last one holds the rest."""
    region = context.partition.region
    bounds = [*range(region.start, region.end, size), region.end]
    return dataclasses.replace(context, partition=Partition(torch.tensor(bounds)))


def with_floor(context: TreeContext, seed: int) -> TreeContext:
    """The context with floor candidates, a fifth of all tokens, many of them tied."""
    rng = torch.Generator().manual_seed(seed)
    score = torch.rand(context.scores.shape, generator=rng, dtype=torch.float64)
    chosen = torch.rand(score.shape, generator=rng) < 0.2
    return dataclasses.replace(context, forced=torch.where(chosen, (score * 4).round(), -torch.inf))


def assert_same_growth(context: TreeContext, engine: str, refiner: str = "binary_extract") -> None:
    """Raise `AssertionError` unless the engine grows the torch engine's trees, up to ties."""
    rule = REFINERS.build(refiner)
    forests = [build_forest(context, Prototype(engine=name), rule) for name in (engine, "torch")]
    bounds, slots = context.partition.bounds.tolist(), context.partition.slots
    for tree in range(forests[0].trees):
        head, slot = divmod(tree, slots)
        trees, root = [children_of(x, tree) for x in forests], (bounds[slot], bounds[slot + 1])
        assert_same_tree(context, head, *trees, root, getattr(rule, "reward", 0.0))
    if not torch.equal(forests[0].start, forests[1].start):
        return  # a tie: the nodes below it differ
    scale = float(forests[1].distortion.max())
    for name in ("distortion", "split_gain", "add_gain"):
        both = (getattr(forest, name) for forest in forests)
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5 * scale)


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
