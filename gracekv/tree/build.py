"""From slots to a `Forest`: tables of a few layers each, and trees grown from them level by level.

Every node down to the single tokens is grown, so the forest can always expand to FullKV.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.tree.base import Forest
from gracekv.tree.context import TreeContext
from gracekv.tree.distortion import Distortion, IntervalTable
from gracekv.tree.refine import Children, Nodes, Refiner
from gracekv.tree.workspace import Workspace

# Layers whose tables fit this together grow together: few large steps instead of many small ones.
_TABLE_BYTES = 2**26


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """Nodes of one level of some layers' trees, by tree and start."""

    tree: Tensor
    start: Tensor
    end: Tensor
    distortion: Tensor
    child_count: Tensor


def build_forest(context: TreeContext, distortion: Distortion, refiner: Refiner) -> Forest:
    """All candidate nodes of all (layer, KV head, slot) trees, priced.

    Source: the paper, "Recursive refinement rule" and Eqs. app_value_conservation,
    app_operation_gains.
    """
    prefill, slots = context.prefill, context.partition.slots
    device = prefill.keys[0].device
    levels: dict[int, list[_Level]] = defaultdict(list)
    spaces: dict[torch.device, Workspace] = {}
    drop = torch.zeros(prefill.layers * prefill.kv_heads * slots, device=device)
    for layers in context.layer_groups(_TABLE_BYTES):
        where = prefill.keys[layers[0]].device
        table = distortion.table(context, layers, spaces.setdefault(where, Workspace(where)))
        first = layers[0] * prefill.kv_heads * slots
        drop[first : first + len(table.drop)] = table.drop.to(device)
        for depth, level in enumerate(_grow(table, first, refiner)):
            levels[depth].append(level)
    merged = [_merge(levels[depth], device) for depth in sorted(levels)]
    return _forest(context, merged, drop.double(), refiner.exact_roots)


def _grow(table: IntervalTable, first_tree: int, refiner: Refiner) -> list[_Level]:
    """All levels of a table's trees."""
    item = torch.arange(len(table.origin), device=table.origin.device)
    start, end = torch.zeros_like(item), table.length
    levels = []
    while True:
        count = torch.zeros_like(item)
        inner = end - start > 1
        nodes = Nodes(item[inner], start[inner], end[inner])
        children = _refine(nodes, table, refiner)
        count[inner] = children.count
        origin = table.origin[item]
        levels.append(
            _Level(
                first_tree + item, origin + start, origin + end, table.at(item, start, end), count
            )
        )
        if not len(children.start):
            return levels
        item = torch.repeat_interleave(nodes.item, children.count)
        start, end = children.start, children.end


def _refine(nodes: Nodes, table: IntervalTable, refiner: Refiner) -> Children:
    """The refiner's children, asked for nodes of similar length at a time.

    Refiners work on grids as wide as the longest node; one long node must not widen all rows.
    """
    size = torch.ceil(torch.log2(nodes.length.float())).long()
    order = size.argsort(stable=True)
    counts, starts, ends = [], [], []
    for group in order.split(torch.bincount(size).tolist()):
        if len(group):
            some = refiner(Nodes(nodes.item[group], nodes.start[group], nodes.end[group]), table)
            counts.append(some.count)
            starts.append(some.start)
            ends.append(some.end)
    if not counts:
        none = torch.empty(0, dtype=torch.int64, device=nodes.item.device)
        return Children(none, none, none)
    count = torch.zeros_like(nodes.item)
    count[order] = torch.cat(counts)
    # Back to the order of the nodes: sort the children by their parent's place.
    place = torch.repeat_interleave(order, torch.cat(counts)).argsort(stable=True)
    return Children(count, torch.cat(starts)[place], torch.cat(ends)[place])


def _merge(parts: list[_Level], device: torch.device) -> _Level:
    """One level of all tables, which come in the order of their trees."""
    return _Level(
        *(
            torch.cat([getattr(part, name).to(device) for part in parts])
            for name in ("tree", "start", "end", "distortion", "child_count")
        )
    )


def _forest(context: TreeContext, levels: list[_Level], drop: Tensor, exact_roots: bool) -> Forest:
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

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(level, name) for level in levels])

    tree, start, end = joined("tree"), joined("start"), joined("end")
    parent, distortion = torch.cat(parents), joined("distortion").double()
    worth = _bottom_up(context, tree, start, end, parent, joined("child_count"), offsets)
    omega = context.sensitivity.to(device).double().flatten()[tree // context.partition.slots]
    children_distortion = torch.zeros_like(distortion)
    children_distortion.index_add_(0, parent[trees:], distortion[trees:])
    price = omega * worth
    is_inner = joined("child_count") > 0
    entries = torch.ones_like(tree)
    if exact_roots:
        entries[:trees] = (end - start)[:trees]
        # Kept as it is: nothing is distorted.
        distortion[:trees] = 0.0
    return Forest(
        layers=prefill.layers,
        heads=prefill.kv_heads,
        slots=context.partition.slots,
        start=start,
        end=end,
        parent=parent,
        first_child=torch.cat(firsts),
        child_count=joined("child_count"),
        tree=tree,
        level=torch.repeat_interleave(torch.arange(len(levels)), sizes).to(device),
        worth=worth,
        distortion=distortion,
        drop=drop,
        entries=entries,
        add_gain=price[:trees] * (drop - distortion[:trees]),
        split_gain=torch.where(is_inner, price * (distortion - children_distortion), 0.0),
    )


def _bottom_up(
    context: TreeContext,
    tree: Tensor,
    start: Tensor,
    end: Tensor,
    parent: Tensor,
    child_count: Tensor,
    offsets: list[int],
) -> Tensor:
    """R(v) float64 [V]: leaves sum their tokens, every other node its children."""
    origin = context.partition.region.start
    tokens = context.tokens.to(tree.device).double().flatten(0, 1)
    head = tree // context.partition.slots
    # Float64 running sums: R is at most 1 per head, so their differences are good to 1e-16.
    running = torch.nn.functional.pad(tokens.cumsum(dim=1), (1, 0))
    sums = running[head, end - origin] - running[head, start - origin]
    single = end - start == 1
    leaf = torch.where(single, tokens[head, start - origin], sums)
    worth = torch.where(child_count == 0, leaf, 0.0)
    for depth in range(len(offsets) - 2, 0, -1):
        level = slice(offsets[depth], offsets[depth + 1])
        worth.index_add_(0, parent[level], worth[level].clone())
    return worth
