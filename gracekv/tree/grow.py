"""All trees of some layers, grown level by level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.tree.distortion import Judge, NodeEnds, Nodes, NodeTable
from gracekv.tree.items import Items
from gracekv.tree.prune import Pruner
from gracekv.tree.refine import Refiner


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Nodes of one level of some layers' trees, by tree and start.

    Attributes:
        tree: int64 [V] forest-wide.
        start: int64 [V] absolute.
        end: int64 [V] exclusive.
        distortion: D float64 [V].
        worth: R float64 [V].
        child_count: int64 [V].
        split_gain: Delta_split float64 [V]; 0 for leaves. Eq. app_operation_gains.
    """

    tree: Tensor
    start: Tensor
    end: Tensor
    distortion: Tensor
    worth: Tensor
    child_count: Tensor
    split_gain: Tensor


# Numbers in a grid below which another call costs more than padding.
_FEW = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """The children of some nodes, in the nodes' order, each node's by start.

    Attributes:
        count: int64 [V].
        start: int64 [sum(count)] relative to the slot.
        end: int64 [sum(count)].
        distortion: D float64 [sum(count)].
    """

    count: Tensor
    start: Tensor
    end: Tensor
    distortion: Tensor


def grow(
    items: Items, judge: Judge, refiner: Refiner, pruner: Pruner | None = None
) -> tuple[list[Level], Tensor]:
    """Every level from the roots down, and D^drop float64 [B] of the roots.

    Trees end in single tokens, or in what `pruner` rules out.

    Args:
        items: the (head, slot) pairs of some layers.
        judge: what their merging costs.
        refiner: how nodes split.
        pruner: the auction's cut so far; it learns the operations of these trees. None: grow
            everything.
    """
    item = torch.arange(len(items.origin), device=items.origin.device)
    start, end = torch.zeros_like(item), items.length
    roots = Nodes(item, start, end)
    groups = [(rows, judge(roots[rows])) for rows in _by_length(roots.length)]
    distortion, drop = _of_roots(roots, groups)
    worth = items.worth(item, start, end)
    # Of the operation that made each node: its key, and its key if the floor's paths are free.
    key = items.price(item, worth) * (drop - distortion).clamp(min=0)
    forced = items.holds_candidate(item, start, end)
    free_key = torch.where(forced, torch.inf, key)
    if pruner is not None:
        pruner.see(key, torch.ones_like(item))
    levels: list[Level] = []
    while True:
        inner = end - start > 1
        if pruner is not None:
            inner &= free_key >= pruner.cut
        chosen = torch.nonzero(inner).flatten()
        nodes = Nodes(item, start, end)[chosen]
        if levels:
            groups = [(rows, judge(nodes[rows])) for rows in _by_length(nodes.length)]
        else:
            groups = list(_restricted(groups, inner))
        split = _refine(nodes, items, groups, refiner)
        count = torch.zeros_like(item)
        count[chosen] = split.count

        parent = torch.repeat_interleave(torch.arange(len(item), device=item.device), count)
        gain = distortion.clone().index_add_(0, parent, split.distortion, alpha=-1.0)
        gain = torch.where(count > 0, gain * items.price(item, worth), 0.0)
        origin = items.origin[item]
        levels.append(
            Level(
                tree=items.tree[item],
                start=origin + start,
                end=origin + end,
                distortion=distortion,
                worth=worth,
                child_count=count,
                split_gain=gain,
            )
        )
        if not len(parent):
            return levels, drop
        unit = gain.clamp(min=0) / (count - 1).clamp(min=1)
        key = torch.minimum(key, unit)
        free_key = torch.where(forced, torch.inf, torch.minimum(free_key, unit))
        if pruner is not None:
            known = count > 0
            pruner.see(key[known], count[known] - 1)
        item, start, end = item[parent], split.start, split.end
        distortion, worth = split.distortion, items.worth(item, start, end)
        key, free_key = key[parent], free_key[parent]
        forced = items.holds_candidate(item, start, end)


def _by_length(length: Tensor) -> list[Tensor]:
    """Rows of similar length, ascending, an octave a group; all at once if they are few.

    Grids are as wide as the longest node; one long node must not widen many rows.
    """
    if not len(length):
        return []
    if len(length) * int(length.max()) < _FEW:
        return [torch.arange(len(length), device=length.device)]
    size = torch.ceil(torch.log2(length.float())).long()
    counts = torch.bincount(size)
    return list(size.argsort(stable=True).split(counts[counts > 0].tolist()))


def _of_roots(roots: Nodes, groups: list[tuple[Tensor, NodeEnds]]) -> tuple[Tensor, Tensor]:
    """D and D^drop of all roots, float64 [B]."""
    distortion = torch.empty(len(roots.item), dtype=torch.float64, device=roots.item.device)
    drop = torch.empty_like(distortion)
    for rows, ends in groups:
        distortion[rows] = ends.suffix[:, 0].double()
        drop[rows] = ends.drop.double()
    return distortion, drop


def _restricted(
    groups: list[tuple[Tensor, NodeEnds]], inner: Tensor
) -> list[tuple[Tensor, NodeEnds]]:
    """What is left of judged groups if only the nodes `inner` (bool) go on."""
    place = inner.cumsum(0) - 1
    found = []
    for rows, ends in groups:
        kept = torch.nonzero(inner[rows]).flatten()
        if len(kept):
            found.append((place[rows[kept]], ends[kept]))
    return found


def _refine(
    nodes: Nodes, items: Items, groups: list[tuple[Tensor, NodeEnds]], refiner: Refiner
) -> _Split:
    """The refiner's children of nodes that were judged in groups of similar length."""
    counts, starts, ends, distortions = [], [], [], []
    for rows, judged in groups:
        table = NodeTable(nodes[rows], items, judged)
        children = refiner(table.nodes, table)
        row = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), children.count)
        counts.append(children.count)
        starts.append(children.start)
        ends.append(children.end)
        distortions.append(table.of_children(row, children.start, children.end))
    if not counts:
        none = torch.empty(0, dtype=torch.int64, device=nodes.item.device)
        return _Split(none, none, none, none.double())
    order = torch.cat([rows for rows, _ in groups])
    count = torch.zeros_like(nodes.item)
    count[order] = torch.cat(counts)
    # Back to the order of the nodes: sort the children by their parent's place.
    place = torch.repeat_interleave(order, torch.cat(counts)).argsort(stable=True)
    return _Split(
        count, torch.cat(starts)[place], torch.cat(ends)[place], torch.cat(distortions)[place]
    )
