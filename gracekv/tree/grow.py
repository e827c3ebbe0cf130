"""All trees of some layers, grown level by level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.tree.distortion import DistortionEvaluator, Nodes
from gracekv.tree.items import Items
from gracekv.tree.prune import Pruner
from gracekv.tree.refine import Refiner
from gracekv.tree.split import TableSplitter


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
        split_gain: Delta_split float64 [V]; 0 for leaves. Eq. (A5).
    """

    tree: Tensor
    start: Tensor
    end: Tensor
    distortion: Tensor
    worth: Tensor
    child_count: Tensor
    split_gain: Tensor


def grow(
    items: Items, evaluator: DistortionEvaluator, refiner: Refiner, pruner: Pruner | None = None
) -> tuple[list[Level], Tensor]:
    """Every level from the roots down, and D^drop float64 [B] of the roots.

    Trees end in single tokens, or in what `pruner` rules out.

    Args:
        items: the (head, slot) pairs of some layers.
        evaluator: what their merging costs.
        refiner: how nodes split.
        pruner: the auction's cut so far; it learns the operations of these trees. None: grow
            everything.
    """
    splitter = evaluator.splitter(refiner) or TableSplitter(items, evaluator, refiner)
    item = torch.arange(len(items.origin), device=items.origin.device)
    start, end = torch.zeros_like(item), items.length
    roots = splitter.roots(Nodes(item, start, end))
    distortion, drop = roots.distortion, roots.drop
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
        if levels:
            split = splitter(Nodes(item, start, end)[chosen], distortion[chosen])
        else:
            split = roots.split(inner)
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
