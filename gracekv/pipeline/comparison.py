"""`compare`: the stages that need all layers at once, before each layer is compressed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from torch import Tensor

from gracekv.allocate import BudgetPlan, Quota
from gracekv.pipeline.composition import Composition
from gracekv.prefill import Prefill
from gracekv.segment import Curvature, Partition
from gracekv.segment.curvature import BlockInput
from gracekv.tree import Forest, TreeContext
from gracekv.tree.build import build_forest
from gracekv.value import Relevance
from gracekv.value.column_sums import ReceivedAttention


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """What `compare` found.

    Attributes:
        relevance: token scores and head sensitivity of all layers.
        partition: the slots of the region.
        quota: int64 [L, G] most entries of each head of all processes, or None.
        received: column sums [L, G, N] that quotas go by instead of the scores, or None.
        forest: the trees, or None where slots are single tokens that stay or go.
        candidates: [L, G, N] float64 as `Floor.candidates` returns them, or None.
    """

    relevance: Relevance
    partition: Partition
    quota: Tensor | None = None
    received: Tensor | None = None
    forest: Forest | None = None
    candidates: Tensor | None = None

    def quota_of(self, rule: Quota, plan: BudgetPlan) -> Tensor | None:
        """int64 [L, G] most entries of each head of all processes under `plan`, or None."""
        return rule(self.relevance.scores if self.received is None else self.received, plan)


def compare(
    pipe: Composition,
    plan: BudgetPlan,
    prefill: Prefill,
    stage: Callable[[str], AbstractContextManager[None]],
) -> tuple[Prefill, Compared]:
    """Segment, score and grow trees, over all layers.

    Args:
        pipe: the strategies.
        plan: the budget in entries.
        prefill: all layers, with the observations that `pipe` needs.
        stage: times a stage of that name.

    Returns the prefill without the hidden states, which only this reads.
    """
    region = prefill.spans.region(plan.recent)
    with stage("segment"):
        partition = pipe.segment(prefill, region)
    with stage("value"):
        scored = pipe.value(prefill, region)
        relevance = Relevance(scored.scores, scored.seed_scores, pipe.sensitivity(prefill))
        sums = prefill.observation(ReceivedAttention()) if pipe.quota.uses_column_sums else None
        found = Compared(relevance, partition, received=sums)
        found = replace(found, quota=found.quota_of(pipe.quota, plan))
    if pipe.selects_tokens(partition):
        return prefill.without(BlockInput), found
    with stage("tree"):
        curvature = partition.curvature
        if curvature is None and pipe.refine.uses_curvature:
            curvature = Curvature()(prefill)
        # Freed unless the caller holds the prefill, too.
        prefill = prefill.without(BlockInput)
        candidates = pipe.floor.candidates(relevance.scores, plan, prefill.shard)
        context = TreeContext(
            prefill=prefill,
            partition=partition,
            scores=relevance.scores,
            seed_scores=relevance.seed_scores,
            sensitivity=relevance.sensitivity,
            rule=pipe.prototype,
            forced=candidates,
            curvature=curvature,
        )
        prunes = pipe.prune and pipe.allocate.prunable and not pipe.certify
        limit = plan.base if prunes and found.quota is None else None
        forest = build_forest(context, pipe.distortion, pipe.refine, limit)
    return prefill, replace(found, forest=forest, candidates=candidates)
