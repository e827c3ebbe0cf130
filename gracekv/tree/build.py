"""From slots to a `Forest`: tables of a few layers each, and the trees grown from them."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from gracekv.tree.base import Forest
from gracekv.tree.context import TreeContext
from gracekv.tree.distortion import Distortion
from gracekv.tree.grow import Level, grow
from gracekv.tree.prune import Pruner
from gracekv.tree.refine import Refiner
from gracekv.tree.workspace import Workspace

# Layers whose tables fit this together grow together: few large steps instead of many small ones.
_TABLE_BYTES = 2**26


def build_forest(
    context: TreeContext, distortion: Distortion, refiner: Refiner, budget: int | None = None
) -> Forest:
    """All candidate nodes of all (layer, KV head, slot) trees, priced.

    Without a budget every node down to the single tokens is there, so the forest can expand to
    FullKV. With one, nodes that a greedy auction of `budget` entries cannot reach are left as
    leaves (see `gracekv.tree.prune`): the auction's result is the same, other allocators may want
    more. Refiners whose operations cost more than 2 entries are never pruned.

    Source: the paper, "Recursive refinement rule" and Eqs. app_bottom_up_value,
    app_operation_gains.
    """
    prefill, slots = context.prefill, context.partition.slots
    device = prefill.keys[0].device
    levels: dict[int, list[Level]] = defaultdict(list)
    spaces: dict[torch.device, Workspace] = {}
    pruner = Pruner(budget) if budget is not None and refiner.max_cost <= 2 else None
    drop = torch.zeros(prefill.layers * prefill.kv_heads * slots, device=device)
    for layers in context.layer_groups(_TABLE_BYTES):
        where = prefill.keys[layers[0]].device
        table = distortion.table(context, layers, spaces.setdefault(where, Workspace(where)))
        first = layers[0] * prefill.kv_heads * slots
        drop[first : first + len(table.drop)] = table.drop.to(device)
        for depth, level in enumerate(grow(table, first, refiner, pruner)):
            levels[depth].append(level)
    merged = [_merge(levels[depth], device) for depth in sorted(levels)]
    return _forest(context, merged, drop.double(), refiner.exact_roots)


def _merge(parts: list[Level], device: torch.device) -> Level:
    """One level of all tables, which come in the order of their trees."""
    names = ("tree", "start", "end", "distortion", "worth", "child_count", "split_gain")
    return Level(*(torch.cat([getattr(part, name).to(device) for part in parts]) for name in names))


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
    whole = _merge(levels, device)
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
