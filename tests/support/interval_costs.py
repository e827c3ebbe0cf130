"""Run a distortion engine on some nodes, and compare the costs of two engines."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch

from gracekv.tree import DistortionEvaluator, IntervalCosts, Nodes, Prototype, TreeContext
from gracekv.tree.engines.base import Engine
from gracekv.tree.tree_batch import TreeBatch, Workspace


def evaluator_of(
    context: TreeContext,
    engine: Engine,
    distortion: Prototype | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[DistortionEvaluator, TreeBatch]:
    """The evaluator for some layers of `context` (None: all), and their trees."""
    layers = list(range(context.prefill.layers)) if layers is None else layers
    batch = TreeBatch.of(context, layers)
    chosen = dataclasses.replace(distortion or Prototype(), engine=engine)
    return chosen.evaluator(batch, Workspace(context.prefill.keys[0].device)), batch


def some_nodes(batch: TreeBatch, seed: int, lengths: Sequence[int]) -> Nodes:
    """One node per length (or the longest that fits), of random trees, by tree and start."""
    rng = torch.Generator().manual_seed(seed)
    tree = torch.randint(len(batch.tree_id), (len(lengths),), generator=rng).sort().values
    slot = batch.length.cpu()[tree]
    length = torch.minimum(torch.tensor(lengths), slot)
    start = (torch.rand(len(lengths), generator=rng) * (slot - length + 1)).long()
    order = (tree * (int(slot.max()) + 1) + start).argsort(stable=True)
    return Nodes(*(x[order].to(batch.tree_id.device) for x in (tree, start, start + length)))


def assert_same_costs(
    got: IntervalCosts,
    want: IntervalCosts,
    nodes: Nodes,
    tolerance: float = 1e-4,
    floor: float = 1e-8,
) -> None:
    """Every number that belongs to a token, within `tolerance` of its size plus `floor`."""
    width = want.mass.shape[1]
    valid = torch.arange(width, device=nodes.length.device) < nodes.length[:, None]
    for name in ("prefix", "suffix", "mass", "drop"):
        ours, theirs = getattr(got, name), getattr(want, name)
        if name != "drop":
            ours, theirs = ours[:, :width][valid], theirs[valid]
        said = partial("{}: {}".format, name)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=floor, msg=said)
