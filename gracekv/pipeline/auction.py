"""`Auction`: which entries a budget buys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate import (
    BudgetPlan,
    Frontier,
    Selection,
    upper_bound,
)
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.allocate.top_tokens import entry_gains, top_tokens
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.precision import AllocatingPrecision, Precision
from gracekv.precision.base import EXACT
from gracekv.prefill import Prefill, Region
from gracekv.tree import Forest
from gracekv.value import Relevance


@dataclass(frozen=True, slots=True, eq=False)
class AuctionResult:
    """What floor and auction bought: `selection`, and over trees how.

    Attributes:
        plan: the budget in entries that was spent.
        selection: the entries that stay.
        utility: summed gains.
        floor: the nodes that the floor bought; None without trees.
        frontier: the nodes that both bought; None without trees. Where bits are allocated, those
            that were offered to it.
        widths: uint8 [E], bits of a number of each entry, where bits are allocated; else None.
    """

    plan: BudgetPlan
    selection: Selection
    utility: float
    floor: Frontier | None = None
    frontier: Frontier | None = None
    widths: Tensor | None = None

    def packed_widths(self, prefill: Prefill, region: Region, precision: Precision) -> list[Tensor]:
        """For each layer uint8 [E], the widths of its packed entries under `precision`."""
        layouts = self.selection.layouts(prefill.spans.length, prefill.keys)
        if self.widths is None:
            return [precision.widths(layout.start, region) for layout in layouts]
        return [layout.of_selected(self.widths, EXACT) for layout in layouts]


@dataclass(frozen=True, slots=True, eq=False)
class Auction:
    """Floor and allocator over the trees of one prompt, or a top-k where there are none.

    Attributes:
        pipeline: the `Pipeline` whose budget is spent.
        prefill: one sequence, of which tokens may be gone.
        quota: int64 [L, G] most entries of each head under a plan, or None.
        relevance: token scores and head sensitivity.
        forest: the trees; None: every token is a slot that stays or goes.
        candidates: [L, G, N] float64 as `Floor.candidates` returns them, or None.
        measured: of each layer what the pipeline's precision measured, where it allocates.
    """

    pipeline: Any
    prefill: Prefill
    quota: Callable[[BudgetPlan], Tensor | None]
    relevance: Relevance
    forest: Forest | None = None
    candidates: Tensor | None = None
    measured: Sequence[Any] = ()

    def spend(self, plan: BudgetPlan) -> AuctionResult:
        """Spend the budget; where it counts bytes, its entries are the most that could fit."""
        costs, size = self.pipeline.costs(self.prefill), plan.bytes
        if costs is None or size is None:
            return self.choose(plan)
        if not isinstance(self.pipeline.precision, AllocatingPrecision):
            return within_bytes(plan, costs, self.choose, self.prefill.shard)
        recent = (plan.total - plan.base) * costs.exact
        return self._with_widths(self.choose(plan), size - recent)

    def choose(self, plan: BudgetPlan) -> AuctionResult:
        """Spend `plan.base` entries, which are those of the heads of all processes."""
        pipeline, shard, quota = self.pipeline, self.prefill.shard, self.quota(plan)
        if quota is not None:
            quota = shard.own_heads(quota, 1)
        if self.forest is None:
            prices = (self.relevance.scores, self.relevance.sensitivity)
            kept = top_tokens(*prices, plan.base, quota, elastic=pipeline.elastic, shard=shard)
            selection = Selection.of_tokens(kept, self.prefill.spans.context_start)
            return AuctionResult(plan, selection, float(entry_gains(*prices, selection).sum()))
        floor = pipeline.floor.realize(self.forest, self.candidates, plan, quota)
        frontier = pipeline.allocate(floor, quota)
        if pipeline.certify:
            empty = Frontier.empty(self.forest, plan.base)
            bound = upper_bound(empty, quota, elastic=pipeline.elastic)
            frontier = replace(frontier, bound=max(bound, frontier.utility))
        selection = Selection.of_frontier(frontier, floor)
        return AuctionResult(plan, selection, frontier.utility, floor, frontier)

    def _with_widths(self, offered: AuctionResult, budget: int) -> AuctionResult:
        """Of the entries that are offered, those that get bits of `budget` bytes."""
        plan, selection = offered.plan, offered.selection
        gains = entry_gains(self.relevance.scores, self.relevance.sensitivity, selection)
        precision, prefill = self.pipeline.precision, self.prefill
        widths = precision.allocate(prefill, self.measured, selection, gains, budget)
        kept = widths > 0
        selection = selection.where(kept)
        total = prefill.shard.total(selection.entries)
        return replace(
            offered,
            plan=replace(plan, total=plan.total - plan.base + total),
            selection=selection,
            widths=widths[kept],
            utility=float(gains[kept.to(gains.device)].sum()),
        )


def within_bytes(
    plan: BudgetPlan,
    costs: EntryBytes,
    choose: Callable[[BudgetPlan], AuctionResult],
    shard: HeadShard = WHOLE,
) -> AuctionResult:
    """The selection of the most entries that take at most `plan.bytes`.

    What a selection takes depends on how its entries lie: the last block of each head is as dear
    as a full one. So the number is searched for, between the recent window alone and `plan.total`,
    by secants and halves in turn; one entry more would not fit. Where a larger budget keeps all
    that a smaller one keeps, as a top-k does, no number beyond it fits either.

    Source: ours.

    Args:
        plan: with `bytes`; its `total` is an upper bound.
        costs: bytes of the entries.
        choose: the selection for a plan of fewer entries.
        shard: which heads the selections are of; by default all.
    """
    limit = plan.bytes
    assert limit is not None  # a plan of entries is spent as it is

    def attempt(total: int) -> tuple[int, AuctionResult]:
        """Bytes that a selection of so many entries leaves, and the selection."""
        result = choose(replace(plan, total=total))
        return limit - selection_bytes(result.selection, plan, costs, shard), result

    # A total of `low` entries leaves `spare` bytes, one of `high` exceeds the limit by `excess`.
    low, high = plan.layers * plan.heads * plan.recent, plan.total
    left, largest = attempt(high)
    if left >= 0:
        return largest
    spare, excess = limit - low * costs.exact, -left
    best: AuctionResult | None = None
    halve = False
    while high - low > 1:
        guess = low + max(1, (high - low) * spare // (spare + excess))
        middle = (low + high) // 2 if halve else min(guess, high - 1)
        left, result = attempt(middle)
        if left >= 0:
            low, spare, best = middle, left, result
        else:
            high, excess = middle, -left
        halve = not halve
    return attempt(low)[1] if best is None else best


def selection_bytes(
    selection: Selection, plan: BudgetPlan, costs: EntryBytes, shard: HeadShard
) -> int:
    """Bytes of the context's entries: those of `selection`, and the recent window of `plan`.

    Of the selections of all processes of `shard`.
    """
    counts, exact = selection.offsets.diff(), 0
    if costs.sinks:
        stays = (selection.start < selection.region[0] + costs.sinks).cpu()
        own = torch.bincount(selection.head_of_entry()[stays], minlength=len(counts))
        counts, exact = counts - own, int(own.sum())
    size = shard.total(costs.heads(exact, counts))
    return plan.layers * plan.heads * plan.recent * costs.exact + size
