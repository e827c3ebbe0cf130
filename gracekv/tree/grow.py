"""All trees of some layers, grown level by level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.kernels.ragged import rows
from gracekv.tree.distortion import DistortionEvaluator
from gracekv.tree.nodes import Nodes
from gracekv.tree.prune import Pruner
from gracekv.tree.refine import Refiner
from gracekv.tree.table_splitter import TableSplitter
from gracekv.tree.tree_batch import TreeBatch


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Nodes of one level of some layers' trees, by tree and start.

    Attributes:
        tree: int64 [V], index in the forest.
        start: int64 [V] absolute.
        end: int64 [V] exclusive.
        distortion: D float64 [V].
        relevance: R float64 [V].
        child_count: int64 [V].
        split_gain: Delta_split float64 [V]; 0 for leaves. Eq. (A5).
    """

    tree: Tensor
    start: Tensor
    end: Tensor
    distortion: Tensor
    relevance: Tensor
    child_count: Tensor
    split_gain: Tensor


def grow(
    batch: TreeBatch, evaluator: DistortionEvaluator, refiner: Refiner, pruner: Pruner
) -> tuple[list[Level], Tensor]:
    """Every level from the roots down, and D^drop float64 [B] of the roots.

    Trees end in single tokens, or where `pruner` stops them.

    Args:
        batch: the trees of some layers.
        evaluator: computes their distortion.
        refiner: how nodes split.
        pruner: the auction's threshold so far; the operations of these trees are added to it.
    """
    splitter = evaluator.splitter(refiner) or TableSplitter(batch, evaluator, refiner)
    nodes = batch.roots()
    roots = splitter.roots(nodes)
    distortion, drop = roots.distortion, roots.drop
    relevance = batch.relevance(nodes)
    # Key of the operation that made each node, and its key if paths to floor candidates are free.
    key = batch.weighted(nodes.tree, relevance) * (drop - distortion).clamp(min=0)
    forced = batch.holds_candidate(nodes)
    free_key = torch.where(forced, torch.inf, key)
    pruner.add(key, torch.ones_like(nodes.tree))
    levels: list[Level] = []
    while True:
        inner = (nodes.length > 1) & (free_key >= pruner.threshold)
        chosen = torch.nonzero(inner).flatten()
        split = splitter(nodes[chosen], distortion[chosen]) if levels else roots.split(inner)
        count = torch.zeros_like(nodes.tree)
        count[chosen] = split.count

        parent = rows(count)
        gain = distortion.clone().index_add_(0, parent, split.distortion, alpha=-1.0)
        gain = torch.where(count > 0, gain * batch.weighted(nodes.tree, relevance), 0.0)
        slot_start = batch.slot_start[nodes.tree]
        levels.append(
            Level(
                tree=batch.tree_id[nodes.tree],
                start=slot_start + nodes.start,
                end=slot_start + nodes.end,
                distortion=distortion,
                relevance=relevance,
                child_count=count,
                split_gain=gain,
            )
        )
        if not len(parent):
            return levels, drop
        utility = gain.clamp(min=0) / (count - 1).clamp(min=1)
        key = torch.minimum(key, utility)
        free_key = torch.where(forced, torch.inf, torch.minimum(free_key, utility))
        is_split = count > 0
        pruner.add(key[is_split], count[is_split] - 1)
        nodes = Nodes(nodes.tree[parent], split.start, split.end)
        distortion, relevance = split.distortion, batch.relevance(nodes)
        key, free_key = key[parent], free_key[parent]
        forced = batch.holds_candidate(nodes)
