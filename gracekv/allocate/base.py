"""`Frontier`, the tree nodes that stay, and the interfaces of strategies that choose them."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gracekv.allocate.plan import BudgetPlan
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.registry import Registry, Strategy
from gracekv.tree.base import Forest


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """The operations that were bought, which determine the nodes that stay.

    Attributes:
        forest: the forest that the masks index.
        added: bool [R], whether Add(r) was executed.
        split: bool [V], whether Split(v) was executed.
        budget: entries that the auction and the floor could spend together (B_base).
        floor_spent: B_floor, entries bought by the floor stage.
        bound: certified upper bound on the attainable utility, if the allocator computed one.

    Invariants (checked by `gracekv.testing.check_frontier`): a split node is on an executed path,
    `spent <= budget`, and every token lies in at most one kept interval.
    """

    forest: Forest
    added: Tensor
    split: Tensor
    budget: int
    floor_spent: int = 0
    bound: float | None = None

    @classmethod
    def empty(cls, forest: Forest, budget: int) -> Frontier:
        """A frontier on which nothing has been bought yet."""
        none = forest.start.new_zeros
        added, split = (none(size, dtype=torch.bool) for size in (forest.trees, forest.nodes))
        return cls(forest, added, split, budget)

    @property
    def reached(self) -> Tensor:
        """bool [V]: nodes that an executed operation put into the cache, even if split later."""
        return torch.cat([self.added, self.split[self.forest.parent[self.forest.trees :]]])

    @property
    def kept(self) -> Tensor:
        """bool [V]: nodes that are physical entries: reached and not split further."""
        return self.reached & ~self.split

    @property
    def spent(self) -> int:
        """Physical entries of the kept nodes (floor and auction; without the recent window)."""
        return int(torch.where(self.kept, self.forest.entries, 0).sum())

    @property
    def utility(self) -> float:
        """Sum of the gains of all executed operations, each clipped at 0 (the auction's aim)."""
        forest = self.forest
        bought = (forest.add_gain[self.added], forest.split_gain[self.split])
        return float(sum(gain.clamp(min=0).sum() for gain in bought))

    def entries_per_head(self) -> Tensor:
        """int64 [L, G] physical entries of the kept nodes."""
        forest = self.forest
        entries = torch.where(self.kept, forest.entries, 0)
        total = entries.new_zeros(forest.layers * forest.heads)
        return total.index_add_(0, forest.head_of_node(), entries).view(forest.layers, forest.heads)


class Floor(Strategy, abc.ABC):
    """Choose exact singletons that are protected before the auction.

    This takes two steps: the trees extract the candidates early, and the candidates are then bought
    in the trees.
    """

    @abc.abstractmethod
    def candidates(
        self, scores: Tensor, plan: BudgetPlan, shard: HeadShard = WHOLE
    ) -> Tensor | None:
        """Floor scores f float64 [L, G, N], -inf for tokens that are not candidates.

        None if there is no floor. `scores` is R^tok [L, G, N] of the heads of `shard`.
        """

    @abc.abstractmethod
    def realize(
        self, forest: Forest, candidates: Tensor | None, plan: BudgetPlan, quota: Tensor | None
    ) -> Frontier:
        """Buy the candidates' paths, within B_base and `quota`; the auction starts from there.

        Args:
            forest: the trees, in which the candidates become leaves.
            candidates: [L, G, N] float64 as returned by `candidates`, or None.
            plan: the budget in entries.
            quota: int64 [L, G] caps, or None.
        """


class Quota(Strategy, abc.ABC):
    """Cap the entries that each (layer, KV head) may hold on top of its recent window.

    Attributes:
        uses_column_sums: whether it reads, in place of scores, the attention that each prompt
            position received from each query head, float32 [L, H, T]. All layers are then read
            first, whatever `compares_layers` says.
        compares_layers: whether a layer's caps depend on the scores of other layers; if not,
            `layer` computes them.
        monotone: whether caps never decrease as the budget grows.
    """

    uses_column_sums: ClassVar[bool] = False
    compares_layers: ClassVar[bool] = True
    monotone: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, scores: Tensor, plan: BudgetPlan) -> Tensor | None:
        """Caps int64 [L, G], or None if only the budget limits.

        Args:
            scores: R^tok [L, G, N], or column sums, see `uses_column_sums`.
            plan: the budget in entries.
        """

    def layer(self, scores: Tensor, layer: int, plan: BudgetPlan) -> Tensor | None:
        """Caps int64 [G] of one layer from its scores [G, N], or None if only the budget limits."""
        caps = self(scores.expand(plan.layers, -1, -1), plan)
        return None if caps is None else caps[layer]


class Allocator(Strategy, abc.ABC):
    """Spend the budget that the floor left on Add and Split operations.

    Pure and deterministic. Never spends more than `start.budget` in total, never holds more than
    `quota[l, g]` entries in a head, executes an operation only after its ancestors, and keeps
    everything that `start` already bought.

    Non-elastic (default): gains are clipped at 0 and zero-gain operations are still bought while
    budget is left. Elastic: stops before operations of gain <= 0. Either way, no remaining
    operation could still be bought by itself.

    Attributes:
        prunable: whether it buys exactly what the greedy auction buys, so nodes beyond the
            auction's reach need not be grown.
        elastic: whether it leaves budget unspent rather than buy operations without gain.
    """

    prunable: ClassVar[bool] = False
    elastic = False

    @abc.abstractmethod
    def __call__(self, start: Frontier, quota: Tensor | None) -> Frontier:
        """Return `start` with everything that the rest of its budget buys.

        Args:
            start: what the floor bought.
            quota: int64 [L, G] maximum entries of each head, including the floor, or None.
        """


FLOORS = Registry("floor", "which exact tokens are protected before the auction", Floor)
QUOTAS = Registry("quota", "how many entries each head may hold", Quota)
ALLOCATORS = Registry("allocate", "which operations the budget buys", Allocator)
