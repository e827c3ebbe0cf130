"""`run_across_layers`: stages that need all layers at once; `run_auction`: what is bought."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gracekv.allocate import BudgetPlan, Frontier, Quota, Selection, upper_bound
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.allocate.top_tokens import check_scores, entry_gains, top_tokens
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.errors import ShapeError
from gracekv.pipeline.composition import Composition
from gracekv.prefill import CaptureInfo, Prefill
from gracekv.segment import Curvature, Partition
from gracekv.segment.curvature import BlockInput
from gracekv.tree import Forest, TreeContext, build_forest
from gracekv.value import Relevance
from gracekv.value.column_sums import ReceivedAttention


@dataclass(frozen=True, slots=True, eq=False)
class AcrossLayers:
    """The result of `run_across_layers`.

    Attributes:
        relevance: token scores and head sensitivity of all layers.
        partition: the slots of the region.
        quota: int64 [L, G] most entries of each head of all processes, or None.
        received: column sums [L, G, N] that quotas use instead of the scores, or None.
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


_Stage = Callable[[str], AbstractContextManager[None]]


def run_across_layers(
    pipe: Composition, plan: BudgetPlan, prefill: Prefill, stage: _Stage
) -> tuple[Prefill, AcrossLayers]:
    """Segment, score and grow trees, over all layers.

    Args:
        pipe: the strategies.
        plan: the budget in entries.
        prefill: all layers, with the observations that `pipe` needs.
        stage: times a stage of that name.

    Returns the prefill without its hidden states, which are needed only here.
    """
    region = prefill.spans.region(plan.recent)
    with stage("segment"):
        partition = pipe.segment(prefill, region)
        _expect(pipe.segment, "slots that cover", partition.region, region)
    with stage("value"):
        scored = pipe.value(prefill, region)
        relevance = Relevance(scored.scores, scored.seed_scores, pipe.sensitivity(prefill))
        sizes = [prefill.layers, prefill.kv_heads, region.length]
        _expect(pipe.value, "scores [L, G, N] =", [*scored.scores.shape], sizes)
        _expect(pipe.sensitivity, "weights [L, G] =", [*relevance.sensitivity.shape], sizes[:2])
        check_scores(relevance.scores, relevance.sensitivity, signed=False)
        sums = prefill.observation(ReceivedAttention()) if pipe.quota.uses_column_sums else None
        across = AcrossLayers(relevance, partition, received=sums)
        across = replace(across, quota=across.quota_of(pipe.quota, plan))
    if pipe.selects_tokens(partition):
        return prefill.without(BlockInput), across
    with stage("tree"):
        curvature = partition.curvature
        if curvature is None and pipe.refine.uses_curvature:
            curvature = Curvature()(prefill)
        # Drop the inputs of blocks, which frees them unless the caller also holds the prefill.
        prefill = prefill.without(BlockInput)
        candidates = pipe.floor.candidates(relevance.scores, plan, prefill.shard)
        facts = (relevance.scores, relevance.seed_scores, relevance.sensitivity)
        context = TreeContext(prefill, partition, *facts, pipe.prototype, candidates, curvature)
        prunes = pipe.prune and pipe.allocate.prunable and not pipe.certify
        limit = plan.base if prunes and across.quota is None else None
        forest = build_forest(context, pipe.distortion, pipe.refine, limit)
    return prefill, replace(across, forest=forest, candidates=candidates)


def _expect(strategy: object, name: str, got: object, want: object) -> None:
    if got != want:
        raise ShapeError(f"{type(strategy).__name__} must return {name} {want}; got {got}.")


@dataclass(frozen=True, slots=True, eq=False)
class AuctionResult:
    """The entries that floor and auction bought.

    Attributes:
        plan: the budget in entries that was spent.
        selection: the entries that stay.
        utility: summed gains.
        floor: the nodes that the floor bought; None without trees or if bits are allocated.
        frontier: the nodes that both bought; None likewise.
        widths: uint8 [E], bits per number of each entry if bits are allocated, else None.
    """

    plan: BudgetPlan
    selection: Selection
    utility: float
    floor: Frontier | None = None
    frontier: Frontier | None = None
    widths: Tensor | None = None


def run_auction(
    pipe: Composition,
    info: CaptureInfo,
    compared: AcrossLayers,
    plan: BudgetPlan,
    costs: EntryBytes | None,
) -> AuctionResult:
    """Spend the budget by floor and allocator, or by a top-k where there are no trees.

    Args:
        pipe: the pipeline; its `certify` asks for an upper bound on the utility of any allocation.
        info: metadata of the sequence.
        compared: scores, and the trees unless every token is a slot that stays or goes.
        plan: the budget; its entries are counted over the heads of all processes.
        costs: bytes of entries, to buy as many as fit in `plan.bytes`; None to buy `plan.base`.
    """

    def choose(plan: BudgetPlan) -> AuctionResult:
        if (quota := compared.quota_of(pipe.quota, plan)) is not None:
            quota = info.shard.own_heads(quota, 1)
        elastic = pipe.allocate.elastic
        if compared.forest is None:
            prices = (compared.relevance.scores, compared.relevance.sensitivity)
            kept = top_tokens(*prices, plan.base, quota, elastic=elastic, shard=info.shard)
            selection = Selection.of_tokens(kept, info.spans.context_start)
            return AuctionResult(plan, selection, float(entry_gains(*prices, selection).sum()))
        floor = pipe.floor.realize(compared.forest, compared.candidates, plan, quota)
        frontier = pipe.allocate(floor, quota)
        if pipe.certify:
            empty = Frontier.empty(compared.forest, plan.base)
            bound = upper_bound(empty, quota, elastic=elastic)
            frontier = replace(frontier, bound=max(bound, frontier.utility))
        selection = Selection.of_frontier(frontier, floor)
        return AuctionResult(plan, selection, frontier.utility, floor, frontier)

    if costs is None or plan.bytes is None:
        return choose(plan)
    return within_bytes(plan, costs, choose, info.shard)


def within_bytes(
    plan: BudgetPlan,
    costs: EntryBytes,
    choose: Callable[[BudgetPlan], AuctionResult],
    shard: HeadShard = WHOLE,
) -> AuctionResult:
    """The selection with the most entries that fit in `plan.bytes`.

    The size of a selection depends on its entries' distribution: the last block of each head costs
    as much as a full one. So the number of entries is found by alternating secant and bisection
    steps between the recent window alone and `plan.total`; one more entry would not fit. If
    selections are nested, as those of a top-k are, no larger number fits either.

    Source: ours.

    Args:
        plan: the budget, in bytes; its `total` is an upper bound.
        costs: bytes of the entries.
        choose: makes the selection for a plan of fewer entries.
        shard: the heads of the selections; all by default.
    """
    limit = plan.bytes
    assert limit is not None  # plans in entries are not searched

    def attempt(total: int) -> tuple[int, AuctionResult]:
        """Bytes left by a selection of `total` entries, and the selection."""
        result = choose(replace(plan, total=total))
        return limit - selection_bytes(result.selection, plan, costs, shard), result

    # A total of `low` entries leaves `spare` bytes, one of `high` exceeds the limit by `excess`.
    low, high = plan.layers * plan.heads * plan.recent, plan.total
    rest, largest = attempt(high)
    if rest >= 0:
        return largest
    spare, excess = limit - low * costs.exact, -rest
    best: AuctionResult | None = None
    halve = False
    while high - low > 1:
        guess = low + max(1, (high - low) * spare // (spare + excess))
        middle = (low + high) // 2 if halve else min(guess, high - 1)
        rest, result = attempt(middle)
        if rest >= 0:
            low, spare, best = middle, rest, result
        else:
            high, excess = middle, -rest
        halve = not halve
    return attempt(low)[1] if best is None else best


def selection_bytes(
    selection: Selection, plan: BudgetPlan, costs: EntryBytes, shard: HeadShard
) -> int:
    """Bytes of the context's entries: those of `selection` and of the recent window of `plan`.

    Summed over all processes of `shard`.
    """
    counts, exact = selection.offsets.diff(), 0
    if costs.sinks:
        stays = (selection.start < selection.region[0] + costs.sinks).cpu()
        own = torch.bincount(selection.head_of_entry()[stays], minlength=len(counts))
        counts, exact = counts - own, int(own.sum())
    size = shard.total(costs.heads(exact, counts))
    return plan.layers * plan.heads * plan.recent * costs.exact + size
