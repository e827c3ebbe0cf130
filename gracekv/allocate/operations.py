"""`Operations`: the Add and Split operations of a forest, as a forest themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gracekv.allocate.base import Frontier
from gracekv.allocate.ranking import where_true
from gracekv.errors import BudgetError, NonFiniteError, ShapeError
from gracekv.kernels.ragged import offsets
from gracekv.tree.base import Forest


@dataclass(frozen=True, slots=True, eq=False)
class Operations:
    """M operations: the Adds of the R roots, then the Splits of the inner nodes.

    Splits keep the nodes' order, so levels are contiguous (Adds are level 0, Splits of the nodes of
    level k are level k+1), `parent` never decreases, and the children of an operation form a range.

    Attributes:
        forest: the trees.
        node: int64 [M], the root that Add inserts or the node that Split replaces.
        parent: int64 [M], the operation that must be executed first; -1 for Adds.
        bounds: level k is operations [bounds[k], bounds[k+1]).
        tree: int64 [M].
        cost: int64 [M], entries that the operation adds, at least 1, Eq. (A6).
        gain: float64 [M], clipped at 0.
        unit: float64 [M], gain / cost, Eq. (A7).
    """

    forest: Forest
    node: Tensor
    parent: Tensor
    bounds: tuple[int, ...]
    tree: Tensor
    cost: Tensor
    gain: Tensor
    unit: Tensor

    @classmethod
    def of(cls, forest: Forest) -> Operations:
        """All operations of `forest`.

        Raises `NonFiniteError` if a gain is NaN or infinite and `ShapeError` if an operation adds
        no entry, since utility per entry would be undefined.
        """
        roots = forest.trees
        has_children = forest.child_count > 0
        inner = where_true(has_children)
        adds = torch.arange(roots, device=inner.device)
        # Index of each node's Split among the operations (meaningless for leaves).
        split_of = has_children.cumsum(0) + (roots - 1)
        # Split(root) comes after the root's Add, which has the root's index.
        above = forest.parent.index_select(0, inner)
        above = torch.where(above < 0, inner, split_of.index_select(0, above.clamp(min=0)))
        # Children are contiguous, so differences of one running sum give their entries.
        first = forest.first_child.index_select(0, inner)
        until = first + forest.child_count.index_select(0, inner)
        running = offsets(forest.entries)
        below = running.index_select(0, until) - running.index_select(0, first)
        cost = torch.cat([forest.entries[:roots], below - forest.entries.index_select(0, inner)])
        gain = torch.cat([forest.add_gain, forest.split_gain.index_select(0, inner)])
        levels = forest.level.index_select(0, inner)
        # One synchronisation for everything that the host must know.
        asked = torch.stack([gain.isfinite().all().long(), cost.min(), forest.level[-1]])
        finite, cheapest, deepest = asked.tolist()
        if not finite:
            raise NonFiniteError(
                "Forest.add_gain or Forest.split_gain holds NaN or infinity, so its operations "
                "cannot be ranked. Check relevance and distortion for overflow."
            )
        if cheapest < 1:
            raise ShapeError(
                f"Every Add and Split must add at least one entry; the cheapest here costs "
                f"{cheapest}. Give each node fewer entries than its children together."
            )
        # `+ 0.0` turns -0.0 into 0.0, so that sorts treat them as equal.
        gain = gain.double().clamp(min=0) + 0.0
        ends = torch.searchsorted(levels, torch.arange(deepest + 1, device=levels.device))
        return cls(
            forest=forest,
            node=torch.cat([adds, inner]),
            parent=torch.cat([torch.full_like(adds, -1), above]),
            bounds=(0, *(roots + ends).tolist()),
            tree=torch.cat([adds, forest.tree.index_select(0, inner)]),
            cost=cost,
            gain=gain,
            unit=gain / cost,
        )

    def __len__(self) -> int:
        return len(self.node)

    def executed(self, frontier: Frontier) -> Tensor:
        """bool [M]: operations that `frontier` has bought."""
        roots = self.forest.trees
        return torch.cat([frontier.added, frontier.split.index_select(0, self.node[roots:])])

    def frontier(self, start: Frontier, executed: Tensor) -> Frontier:
        """`start` with exactly the operations `executed` (bool [M]) bought."""
        roots = self.forest.trees
        split = torch.zeros_like(start.split)
        split[self.node[roots:]] = executed[roots:]
        return replace(start, added=executed[:roots].clone(), split=split)

    def available(self, executed: Tensor) -> Tensor:
        """bool [M]: not yet executed, and the parent is executed or there is none."""
        roots = self.forest.trees
        open_ = torch.ones_like(executed)
        open_[roots:] = executed.index_select(0, self.parent[roots:])
        return open_ & ~executed

    def offered(self, executed: Tensor, *, elastic: bool) -> Tensor:
        """bool [M]: not yet executed; if `elastic`, only on paths whose operations all gain."""
        return ~executed & (self.path_minimum(executed) > 0) if elastic else ~executed

    def path_minimum(self, executed: Tensor) -> Tensor:
        """float64 [M]: least unit utility of each operation and its unexecuted ancestors.

        +inf for executed operations.
        """
        key = torch.where(executed, torch.inf, self.unit)
        for begin, end in zip(self.bounds[1:-1], self.bounds[2:], strict=True):
            above = key.index_select(0, self.parent[begin:end])
            torch.minimum(key[begin:end], above, out=key[begin:end])
        return key

    def parents_among(self, index: Tensor) -> Tensor:
        """int64 [n]: where the parent of each operation at `index` [n] is in `index`, else -1."""
        place = torch.full((len(self) + 1,), -1, device=index.device)
        place[index] = torch.arange(len(index), device=index.device)
        # Parent -1 (none) reads the extra last element.
        return place[self.parent[index]]

    def tie_order(self, index: Tensor) -> Tensor:
        """int64 [n]: sort key of the operations at `index` [n] by layer, head, slot, start, level.

        Inside a tree this is the pre-order.
        """
        forest = self.forest
        first, last = forest.region
        node, levels = self.node[index], len(self.bounds)
        level = torch.where(index < forest.trees, 0, forest.level[node] + 1)
        return (self.tree[index] * (last - first) + forest.start[node] - first) * levels + level

    def head(self, index: Tensor | None = None) -> Tensor:
        """int64 [n]: layer * G + head of the operations at `index` [n], or of all operations."""
        return (self.tree if index is None else self.tree[index]) // self.forest.slots


@dataclass(frozen=True, slots=True, eq=False)
class RemainingBudget:
    """The remaining budget.

    Attributes:
        total: entries left in all heads together, including those of other processes.
        per_head: int64 [L * G] entries left in each head; None without quotas.
    """

    total: int
    per_head: Tensor | None

    def after(self, ops: Operations, bought: Tensor) -> RemainingBudget:
        """The budget that remains after the operations `bought` (bool [M]) of each process."""
        paid = torch.where(bought, ops.cost, 0)
        total = self.total - ops.forest.shard.total(int(paid.sum()))
        if self.per_head is None:
            return RemainingBudget(total, None)
        return RemainingBudget(total, self.per_head.index_add(0, ops.head(), paid, alpha=-1))


def check_quota(quota: Tensor | None, layers: int, heads: int) -> Tensor | None:
    """Return `quota`; raises `ShapeError` unless it is None or [L, G]."""
    if quota is not None and tuple(quota.shape) != (layers, heads):
        raise ShapeError(f"A quota must be [L, G] = [{layers}, {heads}]; got {list(quota.shape)}.")
    return quota


def auction_start(
    start: Frontier, quota: Tensor | None
) -> tuple[Operations, Tensor, RemainingBudget]:
    """The forest's operations, bool [n] which `start` has executed, and the remaining budget.

    That is the budget and the `quota` ([L, G]) less what `start` holds. Raises `BudgetError` if
    `start` already holds more than allowed, `ShapeError` if the quota is not [L, G].
    """
    ops = Operations.of(start.forest)
    executed = ops.executed(start)
    caps = check_quota(quota, ops.forest.layers, ops.forest.heads)
    if caps is not None:
        caps = caps.flatten().to(device=ops.cost.device, dtype=torch.int64)
    room = RemainingBudget(start.budget, caps).after(ops, executed)
    if room.total < 0 or (room.per_head is not None and bool((room.per_head < 0).any())):
        raise BudgetError(
            f"The starting frontier holds more entries than its budget of {start.budget} or a "
            f"head's quota allows. Realise the floor under the same budget and quota."
        )
    return ops, executed, room
