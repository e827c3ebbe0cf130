"""All trees of a table, grown level by level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.tree.distortion import IntervalTable
from gracekv.tree.prune import Pruner
from gracekv.tree.refine import Children, Nodes, Refiner


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


def grow(
    table: IntervalTable, first_tree: int, refiner: Refiner, pruner: Pruner | None = None
) -> list[Level]:
    """Every level from the roots down, to single tokens or to what `pruner` rules out.

    Args:
        table: some consecutive layers.
        first_tree: forest-wide index of the table's first tree.
        refiner: how nodes split.
        pruner: the auction's cut so far; it learns the table's operations. None: grow everything.
    """
    item = torch.arange(len(table.origin), device=table.origin.device)
    start, end = torch.zeros_like(item), table.length
    distortion = table.at(item, start, end)
    worth = table.worth(item, start, end)
    # Of the operation that made each node: its key, and its key if the floor's paths are free.
    key = _price(table, item, worth) * (table.drop.double() - distortion).clamp(min=0)
    forced = table.holds_candidate(item, start, end)
    free_key = torch.where(forced, torch.inf, key)
    if pruner is not None:
        pruner.see(key, torch.ones_like(item))
    levels = []
    while True:
        inner = end - start > 1
        if pruner is not None:
            inner &= free_key >= pruner.cut
        nodes = Nodes(item[inner], start[inner], end[inner])
        children = _refine(nodes, table, refiner)
        count = torch.zeros_like(item)
        count[inner] = children.count

        parent = torch.repeat_interleave(torch.arange(len(item), device=item.device), count)
        below = table.at(item[parent], children.start, children.end)
        gain = distortion.clone().index_add_(0, parent, below, alpha=-1.0)
        gain = torch.where(count > 0, gain * _price(table, item, worth), 0.0)
        origin = table.origin[item]
        levels.append(
            Level(
                tree=first_tree + item,
                start=origin + start,
                end=origin + end,
                distortion=distortion,
                worth=worth,
                child_count=count,
                split_gain=gain,
            )
        )
        if not len(parent):
            return levels
        unit = gain.clamp(min=0) / (count - 1).clamp(min=1)
        key = torch.minimum(key, unit)
        free_key = torch.where(forced, torch.inf, torch.minimum(free_key, unit))
        if pruner is not None:
            split = count > 0
            pruner.see(key[split], count[split] - 1)
        item, start, end = item[parent], children.start, children.end
        distortion, worth = below, table.worth(item, start, end)
        key, free_key = key[parent], free_key[parent]
        forced = table.holds_candidate(item, start, end)


def _price(table: IntervalTable, item: Tensor, worth: Tensor) -> Tensor:
    """omega R of nodes, float64 [V]."""
    return table.sensitivity[table.head(item)] * worth


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
