"""From slots to a `Forest`: the trees of a few layers at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from gracekv.kernels.ragged import offsets, rows
from gracekv.tree.base import Forest, Nodes
from gracekv.tree.distortion import Distortion, DistortionEvaluator, TableSplitter
from gracekv.tree.prune import Pruner
from gracekv.tree.refine import Refiner
from gracekv.tree.tree_batch import TreeBatch, TreeContext, Workspace, scratch_bytes

# Layers whose gathered tokens fit in this grow together: few large steps instead of many small
# ones. None: `scratch_bytes`.
_GROUP_BYTES: int | None = None


def build_forest(
    context: TreeContext, distortion: Distortion, refiner: Refiner, budget: int | None = None
) -> Forest:
    """All candidate nodes of all (layer, KV head, slot) trees, with their gains.

    Without a budget, the forest has every node down to single tokens, so it can expand to FullKV.
    With one, nodes that a greedy auction of `budget` entries cannot split stay leaves (see
    `gracekv.tree.prune`): the auction's result is the same, but other allocators may need more.
    Refiners whose operations cost more than 2 entries are never pruned.

    Source: the paper, "Recursive refinement rule" and Eqs. (V6),
    (A5).
    """
    if (probes := distortion.probes(context)) is not None:
        # Once for all layers, since missing queries are computed by running the model.
        context = replace(context, prefill=context.prefill.with_queries(probes))
    pruner = Pruner(None if refiner.max_cost > 2 else budget)
    nodes, drop = _grow_all(context, distortion, refiner, pruner)
    if not pruner.is_exact():
        # The first layers gain more than the others, so the guess from them pruned too much.
        nodes, drop = _grow_all(context, distortion, refiner, Pruner(budget, pruner.lower_bound()))
    return _forest(context, nodes, drop, refiner.exact_roots)


def _grow_all(
    context: TreeContext, distortion: Distortion, refiner: Refiner, pruner: Pruner
) -> tuple[dict[str, Tensor], Tensor]:
    """The columns of `grow`, sorted by level, tree and start; and D^drop float64 [R]."""
    prefill, slots = context.prefill, context.partition.slots
    device = prefill.keys[0].device
    grown: list[dict[str, Tensor]] = []
    workspaces: dict[torch.device, Workspace] = {}
    trees = prefill.layers * prefill.kv_heads * slots
    drop = torch.zeros(trees, dtype=torch.float64, device=device)
    for layers in context.layer_groups(_GROUP_BYTES or scratch_bytes(device)):
        own = prefill.keys[layers[0]].device
        batch = TreeBatch.of(context, layers)
        evaluator = distortion.evaluator(batch, workspaces.setdefault(own, Workspace(own)))
        with pruner.group(len(layers) / prefill.layers):
            columns, group_drop = grow(batch, evaluator, refiner, pruner)
        # The next group is gathered into the same memory.
        del evaluator
        drop[batch.tree_id.to(device)] = group_drop.to(device)
        grown.append({name: x.to(device) for name, x in columns.items()})
    # Free each part after copying, so nodes are held at most twice.
    nodes = {name: torch.cat([part.pop(name) for part in grown]) for name in list(columns)}
    # Nodes of one tree and level come from one part, in order.
    order = (nodes["level"] * trees + nodes["tree"]).argsort(stable=True)
    return {name: nodes.pop(name)[order] for name in list(nodes)}, drop


def _forest(
    context: TreeContext, nodes: dict[str, Tensor], drop: Tensor, exact_roots: bool
) -> Forest:
    prefill, trees, device = context.prefill, len(drop), drop.device
    count, distortion = nodes["child_count"], nodes["distortion"]
    entries = torch.ones_like(count)
    if exact_roots:
        # Kept token by token: one entry each, without distortion.
        entries[:trees] = (nodes["end"] - nodes["start"])[:trees]
        distortion[:trees] = 0.0
    sensitivity = context.sensitivity.to(device).double().flatten()
    weighted = sensitivity.repeat_interleave(context.partition.slots) * nodes["relevance"][:trees]
    return Forest(
        layers=prefill.layers,
        heads=prefill.kv_heads,
        slots=context.partition.slots,
        # Children are in their parents' order, one level after the other; roots have no parent.
        parent=torch.cat([torch.full((trees,), -1, device=device), rows(count)]),
        first_child=torch.where(count > 0, trees + offsets(count)[:-1], -1),
        drop=drop,
        entries=entries,
        add_gain=weighted * (drop - distortion[:trees]),
        shard=prefill.shard,
        **nodes,
    )


class _Level(NamedTuple):
    """A level of some trees: n places for nodes, of which V split.

    Attributes:
        places: int64 [3, n]: tree in the batch, and start and end relative to the slot. Places with
            start == end have no node.
        numbers: float64 [2, n]: distortion and relevance.
        chosen: int64 [V], indices of the nodes that split, among the places of all levels.
        children: int64 [V], how many each of them has.
        gain: float64 [V], their Delta_split, Eq. (A5).
    """

    places: Tensor
    numbers: Tensor
    chosen: Tensor
    children: Tensor
    gain: Tensor


def grow(
    batch: TreeBatch, evaluator: DistortionEvaluator, refiner: Refiner, pruner: Pruner
) -> tuple[dict[str, Tensor], Tensor]:
    """Every level from the roots down, and D^drop float64 [B] of the roots.

    Trees end in single tokens, or where `pruner` stops them. Synchronises with a GPU once per
    level, for the number of nodes that split.

    Args:
        batch: the trees of some layers.
        evaluator: computes their distortion.
        refiner: how nodes split.
        pruner: the auction's threshold so far; the operations of these trees are added to it.

    Returns:
        The columns of `Forest` by name: level, tree, start, end, child_count, and float64
        distortion, relevance and split_gain.
    """
    splitter = evaluator.splitter(refiner) or TableSplitter(batch, evaluator, refiner)
    nodes = batch.roots()
    roots = splitter.roots(nodes)
    relevance, forced = batch.sums(nodes)
    weight = batch.sensitivity[batch.head(nodes.tree)]
    # Key of the operation that created each node, and that key if paths to floor candidates are
    # free.
    key = weight * relevance * (roots.drop - roots.distortion).clamp(min=0)
    free_key = key.masked_fill(forced, torch.inf)
    pruner.add(key, torch.ones_like(nodes.tree))
    places = torch.stack([nodes.tree, nodes.start, nodes.end])
    numbers = torch.stack([roots.distortion, relevance, weight, key, free_key])
    levels: list[_Level] = []
    begin = 0  # of the level among the places of all levels
    while True:
        *_, free_key = numbers
        length = nodes.length * pruner.reaches(free_key)
        found = (length > 1).cumsum(0)
        # The only synchronisation: the count, together with the width of the next grid.
        count, longest = torch.stack([found[-1], length.max()]).tolist()
        chosen = torch.searchsorted(found, torch.arange(1, count + 1, device=found.device))
        tree, start, end = places[:, chosen]
        parents, forced = Nodes(tree, start, end, longest), forced[chosen]
        distortion, relevance, weight, key, free_key = numbers[:, chosen]
        if not len(chosen):
            levels.append(_Level(places, numbers[:2], chosen, chosen, distortion))
            break
        split = splitter(parents, distortion, forced) if levels else roots.split(chosen, forced)
        count = (split.start < split.end).sum(dim=1)
        gain = reduce(torch.sub, split.distortion.unbind(1), distortion) * (weight * relevance)
        cost = count - 1
        if refiner.rule() is None:
            # The refiner may leave a node as a leaf.
            gain.masked_fill_(cost < 0, 0.0)
            cost.clamp_(min=1)
        levels.append(_Level(places, numbers[:2], chosen + begin, count, gain))
        begin += places.shape[1]
        size = split.start.shape
        if not size[1]:
            break
        utility = gain.clamp(min=0) / cost
        key = torch.minimum(key, utility)
        free_key = torch.minimum(free_key, utility).masked_fill_(forced, torch.inf)
        pruner.add(key, cost)

        places = torch.stack([tree[:, None].expand(size), split.start, split.end]).flatten(1)
        nodes = Nodes(*places)
        relevance, forced = batch.sums(nodes)
        own = (x[:, None].expand(size) for x in (weight, key, free_key))
        numbers = torch.stack([split.distortion, relevance.view(size), *own]).flatten(1)
    return _columns(batch, levels), roots.drop


def _columns(batch: TreeBatch, levels: list[_Level]) -> dict[str, Tensor]:
    """The levels of some trees as columns of a forest; empties `levels`."""
    level = rows(torch.tensor([len(own.places[0]) for own in levels])).to(batch.tree_id.device)
    every = _Level(*(torch.cat(parts, dim=-1) for parts in zip(*levels, strict=True)))
    levels.clear()
    count = torch.zeros_like(every.places[0]).index_copy_(0, every.chosen, every.children)
    gain = torch.zeros_like(every.numbers[0]).index_copy_(0, every.chosen, every.gain)
    _, start, end = every.places
    kept = torch.nonzero(start < end).flatten()
    tree, start, end = every.places[:, kept]
    distortion, relevance = every.numbers[:, kept]
    first = batch.slot_start[tree]
    return {
        "level": level[kept],
        "tree": batch.tree_id[tree],
        "start": first + start,
        "end": first + end,
        "child_count": count[kept],
        "distortion": distortion,
        "relevance": relevance,
        "split_gain": gain[kept],
    }
