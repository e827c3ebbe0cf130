"""`Auction`: which entries a budget buys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from gracekv.allocate import (
    Allocator,
    BudgetPlan,
    Floor,
    Frontier,
    Selection,
    upper_bound,
)
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.allocate.top_tokens import entry_gains, token_gains, top_tokens
from gracekv.allocate.within_bytes import within_bytes
from gracekv.cache.layout import layer_layouts
from gracekv.distributed import HeadShard
from gracekv.precision import Precision
from gracekv.precision.base import EXACT
from gracekv.prefill import Prefill, Region
from gracekv.tree import Forest
from gracekv.value import Relevance


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What floor and auction bought.

    Attributes:
        selection: the entries that stay.
        utility: summed gains.
        start: what the floor bought; None without trees.
        frontier: what both bought; None without trees. Where bits are allocated, the candidates.
        widths: uint8 [E], bits of a number of each entry, where bits are allocated; else None.
    """

    selection: Selection
    utility: float
    start: Frontier | None = None
    frontier: Frontier | None = None
    widths: Tensor | None = None

    def packed_widths(self, prefill: Prefill, region: Region, precision: Precision) -> list[Tensor]:
        """For each layer uint8 [E], the widths of its packed entries under `precision`."""
        layouts = layer_layouts(prefill, self.selection)
        if self.widths is None:
            return [precision.widths(layout.start, region) for layout in layouts]
        return [layout.of_selected(self.widths, EXACT) for layout in layouts]


@dataclass(frozen=True, slots=True, eq=False)
class Auction:
    """Floor and allocator over the trees of one prompt, or a top-k where there are none.

    Attributes:
        floor: protects tokens before the auction.
        allocate: spends the rest.
        certify: also bound what any allocation could reach.
        origin: the first compressible position.
        relevance: token scores and head sensitivity.
        forest: the trees; None: every token is a slot that stays or goes.
        candidates: [L, G, N] float64 as `Floor.candidates` returns them, or None.
        shard: which heads these are; None: all.
    """

    floor: Floor
    allocate: Allocator
    certify: bool
    origin: int
    relevance: Relevance
    forest: Forest | None
    candidates: Tensor | None
    shard: HeadShard | None = None

    @property
    def elastic(self) -> bool:
        """Whether budget is left unspent rather than buy what gains nothing."""
        return bool(getattr(self.allocate, "elastic", False))

    def spend(
        self,
        plan: BudgetPlan,
        costs: EntryBytes | None,
        quota: Tensor | None,
        quota_of: Callable[[BudgetPlan], Tensor | None],
        precision: Precision,
        prefill: Prefill,
    ) -> tuple[BudgetPlan, Choice]:
        """Spend the budget, in entries or in bytes; also returns the plan in entries.

        Args:
            plan: the budget; where it counts bytes, its entries are the most that could fit.
            costs: bytes of the entries; None: all are as they are.
            quota: int64 [L, G] most entries of each head under `plan`, or None.
            quota_of: the same under another plan.
            precision: how entries are stored.
            prefill: one sequence.
        """
        if precision.allocates:
            return self._with_widths(plan, self.choose(plan, quota), precision, prefill)
        if costs is None or plan.bytes is None:
            return plan, self.choose(plan, quota)
        return within_bytes(plan, costs, lambda p: self.choose(p, quota_of(p)), self.shard)

    def _with_widths(
        self, plan: BudgetPlan, candidates: Choice, precision: Precision, prefill: Prefill
    ) -> tuple[BudgetPlan, Choice]:
        selection = candidates.selection
        worth = entry_gains(self.relevance.scores, self.relevance.sensitivity, selection)
        region = prefill.spans.region(plan.recent)
        widths = precision.allocate(prefill, region, selection, worth, plan)
        kept = widths > 0
        chosen = replace(
            candidates,
            selection=selection.where(kept),
            widths=widths[kept],
            utility=float(worth[kept.to(worth.device)].sum()),
        )
        total = chosen.selection.entries
        if self.shard is not None:
            total = self.shard.total(total)
        return replace(plan, total=plan.layers * plan.heads * plan.recent + total), chosen

    def choose(self, plan: BudgetPlan, quota: Tensor | None) -> Choice:
        """Spend `plan.base` entries, at most `quota` (int64 [L, G]) in each head.

        Both are of the heads of all processes.
        """
        if self.shard is not None and quota is not None:
            quota = self.shard.own_heads(quota, 1)
        if self.forest is None:
            prices = (self.relevance.scores, self.relevance.sensitivity)
            kept = top_tokens(*prices, plan.base, quota, elastic=self.elastic, shard=self.shard)
            selection = Selection.of_tokens(kept, self.origin)
            return Choice(selection, float(token_gains(*prices, selection).sum()))
        start = self.floor.realize(self.forest, self.candidates, plan, quota)
        frontier = self.allocate(start, quota)
        if self.certify:
            empty = Frontier.empty(self.forest, plan.base)
            bound = upper_bound(empty, quota, elastic=self.elastic)
            frontier = replace(frontier, bound=max(bound, frontier.utility))
        selection = Selection.of_frontier(frontier, start)
        return Choice(selection, frontier.utility, start, frontier)
