"""From slots to a `Forest`: the trees of a few layers at a time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields

import torch
from torch import Tensor

from gracekv.tree.base import Forest
from gracekv.tree.context import TreeContext
from gracekv.tree.distortion import Distortion
from gracekv.tree.grow import Level, grow
from gracekv.tree.items import Items
from gracekv.tree.memory import scratch_bytes
from gracekv.tree.prune import Pruner
from gracekv.tree.refine import Refiner
from gracekv.tree.workspace import Workspace

# Layers whose gathered tokens fit this grow together: few large steps instead of many small ones.
# None: as much as `scratch_bytes` says.
_GROUP_BYTES: int | None = None


def build_forest(
    context: TreeContext, distortion: Distortion, refiner: Refiner, budget: int | None = None
) -> Forest:
    """All candidate nodes of all (layer, KV head, slot) trees, priced.

    Without a budget every node down to the single tokens is there, so the forest can expand to
    FullKV. With one, nodes that a greedy auction of `budget` entries cannot reach are left as
    leaves (see `gracekv.tree.prune`): the auction's result is the same, other allocators may want
    more. Refiners whose operations cost more than 2 entries are never pruned.

    Source: the paper, "Recursive refinement rule" and Eqs. (V6),
    (A5).
    """
    if budget is None or refiner.max_cost > 2:
        levels, drop = _grow(context, distortion, refiner, Pruner())
    else:
        pruner = Pruner(budget)
        levels, drop = _grow(context, distortion, refiner, pruner)
        if not pruner.holds():
            # The first layers were richer than the rest, and hid too much of it.
            levels, drop = _grow(context, distortion, refiner, Pruner(budget, pruner.bound()))
    return _forest(context, levels, drop, refiner.exact_roots)


def _grow(
    context: TreeContext, distortion: Distortion, refiner: Refiner, pruner: Pruner
) -> tuple[list[Level], Tensor]:
    """All levels of all trees, and D^drop float64 [R]."""
    prefill, slots = context.prefill, context.partition.slots
    device = prefill.keys[0].device
    levels: dict[int, list[Level]] = defaultdict(list)
    spaces: dict[torch.device, Workspace] = {}
    trees = prefill.layers * prefill.kv_heads * slots
    drop = torch.zeros(trees, dtype=torch.float64, device=device)
    for layers in context.layer_groups(_GROUP_BYTES or scratch_bytes(device)):
        where = prefill.keys[layers[0]].device
        items = Items.of(context, layers, refiner.lifts_candidates)
        space = spaces.setdefault(where, Workspace(where))
        evaluator = distortion.evaluator(context, layers, items, space)
        with pruner.part(len(layers) / prefill.layers):
            grown, dropped = grow(items, evaluator, refiner, pruner)
        # The next group is gathered into the same memory.
        del evaluator
        drop[items.tree.to(device)] = dropped.to(device)
        for depth, level in enumerate(grown):
            levels[depth].append(level)
    return [_merge(levels[depth], device) for depth in sorted(levels)], drop


def _merge(parts: list[Level], device: torch.device) -> Level:
    """One level of all layers, in the order of the trees."""
    tree = torch.cat([part.tree.to(device) for part in parts])
    # Nodes of one tree are in order already, and come from one part.
    order = tree.argsort(stable=True) if len(parts) > 1 else slice(None)
    names = ("tree", "start", "end", "distortion", "worth", "child_count", "split_gain")
    return Level(
        *(torch.cat([getattr(part, name).to(device) for part in parts])[order] for name in names)
    )


def _forest(context: TreeContext, levels: list[Level], drop: Tensor, exact_roots: bool) -> Forest:
    prefill, trees = context.prefill, len(drop)
    device = drop.device
    sizes = torch.tensor([len(level.tree) for level in levels])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).tolist()
    parents, firsts = [torch.full((trees,), -1, dtype=torch.int64, device=device)], []
    for depth, level in enumerate(levels):
        # Children lie in their parents' order, so their places are running sums of the counts.
        index = torch.arange(offsets[depth], offsets[depth + 1], device=device)
        first = offsets[depth + 1] + level.child_count.cumsum(0) - level.child_count
        firsts.append(torch.where(level.child_count > 0, first, -1))
        if depth + 1 < len(levels):
            parents.append(torch.repeat_interleave(index, level.child_count))
    whole = Level(*(torch.cat([getattr(level, x.name) for level in levels]) for x in fields(Level)))
    distortion, entries = whole.distortion, torch.ones_like(whole.tree)
    if exact_roots:
        # Kept token by token: an entry each, and nothing is distorted.
        entries[:trees] = (whole.end - whole.start)[:trees]
        distortion[:trees] = 0.0
    price = context.sensitivity.to(device).double().flatten().repeat_interleave(
        context.partition.slots
    ) * whole.worth[:trees]  # fmt: skip
    return Forest(
        layers=prefill.layers,
        heads=prefill.kv_heads,
        slots=context.partition.slots,
        start=whole.start,
        end=whole.end,
        parent=torch.cat(parents),
        first_child=torch.cat(firsts),
        child_count=whole.child_count,
        tree=whole.tree,
        level=torch.repeat_interleave(torch.arange(len(levels)), sizes).to(device),
        worth=whole.worth,
        distortion=distortion,
        drop=drop,
        entries=entries,
        add_gain=price * (drop - distortion[:trees]),
        split_gain=whole.split_gain,
    )
