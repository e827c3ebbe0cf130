"""`Frontier` (nodes of trees that stay), `Selection` (entries that stay), and the interfaces."""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gracekv.allocate.plan import BudgetPlan
from gracekv.distributed.head_shard import HeadShard
from gracekv.kernels.ragged import offsets, rows, rows_and_steps
from gracekv.registry import Registry, Strategy
from gracekv.tree.base import Forest


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """Which operations were bought, and thus which nodes stay.

    Attributes:
        forest: the forest that the masks index.
        added: bool [R], Add(r) was executed.
        split: bool [V], Split(v) was executed.
        budget: entries that the auction and the floor could spend together (B_base).
        floor_spent: B_floor, entries bought by the floor stage.
        bound: certified upper bound of the attainable utility, if the allocator computed one.

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
        """Nothing bought yet."""
        device = forest.start.device
        return cls(
            forest,
            added=torch.zeros(forest.trees, dtype=torch.bool, device=device),
            split=torch.zeros(forest.nodes, dtype=torch.bool, device=device),
            budget=budget,
        )

    @property
    def reached(self) -> Tensor:
        """bool [V]: nodes that an executed operation put into the cache, split later or not."""
        forest = self.forest
        reached = torch.zeros_like(self.split)
        reached[: forest.trees] = self.added
        inner = forest.parent >= 0
        reached[inner] = self.split[forest.parent[inner]]
        return reached

    @property
    def kept(self) -> Tensor:
        """bool [V]: nodes that are physical entries: reached and not split further."""
        return self.reached & ~self.split

    @property
    def spent(self) -> int:
        """Physical entries of the kept nodes (floor and auction; without the recent window)."""
        return int(self.forest.entries[self.kept].sum())

    @property
    def utility(self) -> float:
        """Gains of all executed operations, each clipped at 0, summed (the auction's measure)."""
        forest = self.forest
        gain = forest.add_gain[self.added].clamp(min=0).sum()
        return float(gain + forest.split_gain[self.split].clamp(min=0).sum())

    def entries_per_head(self) -> Tensor:
        """int64 [L, G] physical entries of the kept nodes."""
        forest, kept = self.forest, self.kept
        counts = torch.zeros(forest.layers * forest.heads, dtype=torch.int64, device=kept.device)
        counts.index_add_(0, forest.head_of_node()[kept], forest.entries[kept])
        return counts.view(forest.layers, forest.heads)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The E entries of the compressible region that stay, head after head, by position.

    An entry is one token, or the merged tokens [start, end) of a node.

    Attributes:
        layers: L.
        heads: G.
        region: first compressible position, and the one after the last.
        offsets: int64 [L*G + 1] on the CPU; head layer * G + g holds entries
            [offsets[h], offsets[h + 1]).
        start: int32 [E] absolute positions.
        end: int32 [E], exclusive; None: every entry is a single token.
        level: int16 [E] level of the entry's node in its tree; None: all are 0.
        from_floor: bool [E], bought by the floor; None: none is.
    """

    layers: int
    heads: int
    region: tuple[int, int]
    offsets: Tensor
    start: Tensor
    end: Tensor | None = None
    level: Tensor | None = None
    from_floor: Tensor | None = None

    @classmethod
    def of_tokens(cls, kept: Tensor, origin: int) -> Selection:
        """The tokens where `kept` (bool [L, G, N]) holds; `origin` is the position of the first."""
        layers, heads, tokens = kept.shape
        # Layer by layer: torch's indices and sums take 8 to 16 bytes a token.
        start = [torch.nonzero(layer)[:, 1].to(torch.int32) + origin for layer in kept]
        counts = torch.cat([layer.sum(dim=1) for layer in kept]).cpu()
        region = (origin, origin + tokens)
        return cls(layers, heads, region, offsets(counts), torch.cat(start))

    @classmethod
    def of_frontier(cls, frontier: Frontier, floor: Frontier | None = None) -> Selection:
        """The kept nodes of `frontier`; those that stay as original tokens are an entry a token.

        `floor` is what the floor had bought.
        """
        forest = frontier.forest
        node = torch.nonzero(frontier.kept).flatten()
        head, start = forest.head_of_node()[node], forest.start[node]
        first, last = int(forest.start.min()), int(forest.end.max())
        order = (head * (last - first) + start).argsort()
        node, head, start = node[order], head[order], start[order]
        row, step = rows_and_steps(forest.entries[node])
        start = start[row] + step
        end = torch.where(forest.entries[node] > 1, 1, forest.length[node])[row] + start
        counts = torch.bincount(head[row], minlength=forest.layers * forest.heads).cpu()
        return cls(
            layers=forest.layers,
            heads=forest.heads,
            region=(first, last),
            offsets=offsets(counts),
            start=start.to(torch.int32),
            end=end.to(torch.int32),
            level=forest.level[node][row].to(torch.int16),
            from_floor=None if floor is None else floor.reached[node][row],
        )

    @property
    def entries(self) -> int:
        """E."""
        return len(self.start)

    def head_of_entry(self) -> Tensor:
        """int64 [E]: layer * G + head of each entry, on the CPU."""
        return rows(self.offsets.diff())

    def per_head(self) -> Tensor:
        """int64 [L, G] entries, on the CPU."""
        return self.offsets.diff().view(self.layers, self.heads)

    def where(self, mask: Tensor) -> Selection:
        """The entries where `mask` (bool [E]) holds."""
        inside = offsets(mask.cpu().long())
        mask = mask.to(self.start.device)
        return replace(
            self,
            offsets=inside[self.offsets],
            start=self.start[mask],
            end=None if self.end is None else self.end[mask],
            level=None if self.level is None else self.level[mask],
            from_floor=None if self.from_floor is None else self.from_floor[mask],
        )

    def cpu(self) -> Selection:
        """The same on the CPU."""
        return replace(
            self,
            start=self.start.cpu(),
            end=None if self.end is None else self.end.cpu(),
            level=None if self.level is None else self.level.cpu(),
            from_floor=None if self.from_floor is None else self.from_floor.cpu(),
        )


class Floor(Strategy, abc.ABC):
    """Exact singletons that are protected before the auction.

    Two steps: the trees need the candidates (they extract them early), and buying them needs the
    trees.
    """

    @abc.abstractmethod
    def candidates(
        self, scores: Tensor, plan: BudgetPlan, shard: HeadShard | None = None
    ) -> Tensor | None:
        """Score f of each candidate token, -inf elsewhere: [L, G, N] float64; None: no floor.

        `scores` is R^tok [L, G, N], of the heads that `shard` says; None: of all.
        """

    @abc.abstractmethod
    def realize(
        self, forest: Forest, candidates: Tensor | None, plan: BudgetPlan, quota: Tensor | None
    ) -> Frontier:
        """Buy the candidates' paths, within B_base and `quota`; the auction starts from there.

        Args:
            forest: the trees, whose leaves the candidates become.
            candidates: [L, G, N] float64 as returned by `candidates`, or None.
            plan: the budget in entries.
            quota: int64 [L, G] caps, or None.
        """


class Quota(Strategy, abc.ABC):
    """Most entries that each (layer, KV head) may hold on top of its recent window.

    Attributes:
        uses_column_sums: it reads `columns`, which the pipeline then provides.
        by_layer: a layer's caps follow from the plan and its own scores, as `layer` gives them.
        monotone: no cap falls as the budget grows.
    """

    uses_column_sums: ClassVar[bool] = False
    by_layer: ClassVar[bool] = False
    monotone: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(
        self, scores: Tensor, plan: BudgetPlan, columns: Tensor | None = None
    ) -> Tensor | None:
        """int64 [L, G] caps; None: no cap but the budget.

        Args:
            scores: R^tok [L, G, N].
            plan: the budget in entries.
            columns: [L, H, T] float32 attention that each prompt position received in all, per
                query head; None unless some stage uses it.
        """

    def layer(self, scores: Tensor, layer: int, plan: BudgetPlan) -> Tensor | None:
        """int64 [G]: the caps of one layer from its scores [G, N]; None: no cap but the budget."""
        caps = self(scores.expand(plan.layers, -1, -1), plan)
        return None if caps is None else caps[layer]


class Allocator(Strategy, abc.ABC):
    """Spend what the floor left over on Add and Split operations.

    Pure and deterministic. Never spends more than `start.budget` in all, never holds more than
    `quota[l, g]` entries in a head, executes an operation only after its ancestors, and keeps
    everything that `start` already bought.

    Non-elastic (default): gains are clipped at 0 and zero-gain operations are still bought while
    budget is left. Elastic: stops before operations of gain <= 0.

    Attributes:
        prunable: the result is that of the greedy auction, so nodes that the auction cannot reach
            need not be grown.
    """

    prunable: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, start: Frontier, quota: Tensor | None) -> Frontier:
        """`start` and what the rest of its budget buys.

        Args:
            start: what the floor bought.
            quota: int64 [L, G] most entries of each head, floor included, or None.
        """


FLOORS: Registry[Floor] = Registry("floor", "which exact tokens are protected before the auction")
Floor.registry = FLOORS
QUOTAS: Registry[Quota] = Registry("quota", "how many entries each head may hold")
Quota.registry = QUOTAS
ALLOCATORS: Registry[Allocator] = Registry("allocate", "which operations the budget buys")
Allocator.registry = ALLOCATORS
