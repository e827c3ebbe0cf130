"""From slots to a `Forest`: the trees of a few layers at a time."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from gracekv.kernels.ragged import offsets, rows
from gracekv.tree.base import Forest
from gracekv.tree.distortion import Distortion, DistortionEvaluator, TableSplitter
from gracekv.tree.nodes import Nodes
from gracekv.tree.prune import Pruner
from gracekv.tree.refine import Refiner
from gracekv.tree.tree_batch import TreeBatch, TreeContext
from gracekv.tree.workspace import Workspace, scratch_bytes

# Layers whose gathered tokens fit this grow together: few large steps instead of many small ones.
# None: as much as `scratch_bytes` says.
_GROUP_BYTES: int | None = None


def build_forest(
    context: TreeContext, distortion: Distortion, refiner: Refiner, budget: int | None = None
) -> Forest:
    """All candidate nodes of all (layer, KV head, slot) trees, with their gains.

    Without a budget every node down to the single tokens is there, so the forest can expand to
    FullKV. With one, nodes that a greedy auction of `budget` entries cannot reach are left as
    leaves (see `gracekv.tree.prune`): the auction's result is the same, other allocators may want
    more. Refiners whose operations cost more than 2 entries are never pruned.

    Source: the paper, "Recursive refinement rule" and Eqs. (V6),
    (A5).
    """
    probes = distortion.probes(context)
    if probes is not None:
        # Once for all layers: what was not captured is computed by running the model.
        context = replace(context, prefill=context.prefill.with_queries(probes))
    if budget is None or refiner.max_cost > 2:
        nodes, drop = _grow_all(context, distortion, refiner, Pruner())
    else:
        pruner = Pruner(budget)
        nodes, drop = _grow_all(context, distortion, refiner, pruner)
        if not pruner.is_exact():
            # The first layers gain more than the others, so their guess pruned too much.
            pruner = Pruner(budget, pruner.lower_bound())
            nodes, drop = _grow_all(context, distortion, refiner, pruner)
    return _forest(context, nodes, drop, refiner.exact_roots)


def _grow_all(
    context: TreeContext, distortion: Distortion, refiner: Refiner, pruner: Pruner
) -> tuple[dict[str, Tensor], Tensor]:
    """All nodes of all trees as in `Grown`, by name; and D^drop float64 [R]."""
    prefill, slots = context.prefill, context.partition.slots
    device = prefill.keys[0].device
    grown: list[Grown] = []
    workspaces: dict[torch.device, Workspace] = {}
    trees = prefill.layers * prefill.kv_heads * slots
    drop = torch.zeros(trees, dtype=torch.float64, device=device)
    for layers in context.layer_groups(_GROUP_BYTES or scratch_bytes(device)):
        own = prefill.keys[layers[0]].device
        batch = TreeBatch.of(context, layers)
        workspace = workspaces.setdefault(own, Workspace(own))
        evaluator = distortion.evaluator(batch, workspace)
        with pruner.group(len(layers) / prefill.layers):
            group, group_drop = grow(batch, evaluator, refiner, pruner)
        # The next group is gathered into the same memory.
        del evaluator
        drop[batch.tree_id.to(device)] = group_drop.to(device)
        grown += group
    columns = {
        x.name: torch.cat([getattr(part, x.name).to(device) for part in grown])
        for x in fields(Grown)
    }
    # What is copied is freed: nodes are held twice at most.
    grown.clear()
    del group
    # Nodes of one tree and level come from one part, in order.
    order = (columns["level"] * trees + columns["tree"]).argsort(stable=True)
    return {name: columns.pop(name)[order] for name in list(columns)}, drop


def _forest(
    context: TreeContext, nodes: dict[str, Tensor], drop: Tensor, exact_roots: bool
) -> Forest:
    prefill, trees, device = context.prefill, len(drop), drop.device
    count, distortion = nodes["child_count"], nodes["distortion"]
    entries = torch.ones_like(count)
    if exact_roots:
        # Kept token by token: an entry each, without distortion.
        entries[:trees] = (nodes["end"] - nodes["start"])[:trees]
        distortion[:trees] = 0.0
    sensitivity = context.sensitivity.to(device).double().flatten()
    weighted = sensitivity.repeat_interleave(context.partition.slots) * nodes["relevance"][:trees]
    return Forest(
        layers=prefill.layers,
        heads=prefill.kv_heads,
        slots=context.partition.slots,
        # Children lie in their parents' order, one level after the other; roots have no parent.
        parent=torch.cat([torch.full((trees,), -1, device=device), rows(count)]),
        first_child=torch.where(count > 0, trees + offsets(count)[:-1], -1),
        drop=drop,
        entries=entries,
        add_gain=weighted * (drop - distortion[:trees]),
        shard=prefill.shard,
        **nodes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Grown:
    """Nodes of some layers' trees, by level, tree and start.

    Attributes:
        level: int64 [V], 0 for roots.
        tree: int64 [V], index in the forest.
        start: int64 [V] absolute.
        end: int64 [V] exclusive.
        distortion: D float64 [V].
        relevance: R float64 [V].
        child_count: int64 [V].
        split_gain: Delta_split float64 [V]; 0 for leaves. Eq. (A5).
    """

    level: Tensor
    tree: Tensor
    start: Tensor
    end: Tensor
    distortion: Tensor
    relevance: Tensor
    child_count: Tensor
    split_gain: Tensor


def grow(
    batch: TreeBatch, evaluator: DistortionEvaluator, refiner: Refiner, pruner: Pruner
) -> tuple[list[Grown], Tensor]:
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
    levels: list[Grown] = []
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
            Grown(
                level=torch.full_like(nodes.tree, len(levels)),
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
