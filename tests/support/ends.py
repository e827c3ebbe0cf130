"""Ask an engine of the distortion about nodes, and compare what two of them say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch

from gracekv.tree import DistortionEvaluator, IntervalCosts, Items, Nodes, Prototype, TreeContext
from gracekv.tree.engines import Engine
from gracekv.tree.workspace import Workspace


def evaluator_of(
    context: TreeContext, engine: Engine, distortion: Prototype | None = None
) -> tuple[DistortionEvaluator, Items]:
    """Who answers for all layers of `context`, and for which items."""
    layers = list(range(context.prefill.layers))
    items = Items.of(context, layers)
    chosen = dataclasses.replace(distortion or Prototype(), engine=engine)
    return chosen.evaluator(
        context, layers, items, Workspace(context.prefill.keys[0].device)
    ), items


def some_nodes(items: Items, seed: int, lengths: Sequence[int]) -> Nodes:
    """One node per length (or as long as fits), of random items, ordered by item and start."""
    rng = torch.Generator().manual_seed(seed)
    item = torch.randint(len(items.origin), (len(lengths),), generator=rng).sort().values
    slot = items.length.cpu()[item]
    length = torch.minimum(torch.tensor(lengths), slot)
    start = (torch.rand(len(lengths), generator=rng) * (slot - length + 1)).long()
    order = (item * (int(slot.max()) + 1) + start).argsort(stable=True)
    device = items.origin.device
    return Nodes(*(x[order].to(device) for x in (item, start, start + length)))


def assert_same_ends(
    got: IntervalCosts,
    want: IntervalCosts,
    nodes: Nodes,
    tolerance: float = 1e-4,
    floor: float = 1e-8,
) -> None:
    """Every number that belongs to a token, within `tolerance` of its size plus `floor`."""
    width = want.mass.shape[1]
    real = torch.arange(width, device=nodes.length.device) < nodes.length[:, None]
    for name in ("prefix", "suffix", "mass", "drop"):
        ours, theirs = getattr(got, name), getattr(want, name)
        if name != "drop":
            ours, theirs = ours[:, :width][real], theirs[real]
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=floor, msg=partial(_of, name))


def _of(name: str, text: str) -> str:
    return f"{name}: {text}"
