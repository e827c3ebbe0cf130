"""`Auction`: which entries a budget buys."""

from __future__ import annotations

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
from gracekv.allocate.top_tokens import token_gains, top_tokens
from gracekv.distributed import HeadShard
from gracekv.tree import Forest
from gracekv.value import Relevance


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What floor and auction bought.

    Attributes:
        selection: the entries that stay.
        utility: summed gains.
        start: what the floor bought; None without trees.
        frontier: what both bought; None without trees.
    """

    selection: Selection
    utility: float
    start: Frontier | None = None
    frontier: Frontier | None = None


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
