"""`lagrangian`: allocation with a certified bound, through a price per entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from gracekv.allocate.base import ALLOCATORS, Allocator, Frontier
from gracekv.allocate.greedy import auction
from gracekv.allocate.operations import Operations, RemainingBudget, auction_start
from gracekv.allocate.ranking import where_true

# Maximum evaluations of the dual function per bracket; it stops when tight. Source: ours.
_ITERATIONS = 60


@ALLOCATORS.register("lagrangian")
class Lagrangian(Allocator):
    """Buy the best subtrees at one price per entry, fill up greedily, and certify the result.

    At the price lam, a tree's best subtree (operations with all their ancestors) under gain - lam
    cost is a bottom-up sum of positive parts. The dual function g(lam) = lam B + the sum of those
    values bounds every allocation from above and is convex; its minimum is bracketed by bisection.
    The subtrees at the upper end of the bracket fit the budget; those at its lower end are added
    tree by tree while they fit, and the greedy auction spends the rest. Unlike the auction alone,
    this reaches valuable leaves behind poor steps. If the auction from `start` does better, its
    result is returned. Quotas become one more price per head, so the bound accounts for them.

    `Frontier.bound` bounds the clipped-gain utility of everything that can be reached from `start`,
    including what `start` holds. Elastic allocations never pass an operation without gain, and
    their bound is over such allocations.

    Source: ours (the problem is Eq. (A8)); departures 9.

    Cost: at most a few times 60 passes over the levels of the forest, O(V) each, and one
    greedy auction.

    Attributes:
        elastic: leave budget unspent rather than buy an operation of gain <= 0.
    """

    elastic: bool = False
    removed_fields = (("iterations", 60),)

    def __call__(self, start: Frontier, quota: Tensor | None) -> Frontier:
        ops, executed, room = auction_start(start, quota)
        dual = _Dual(ops, executed, room, elastic=self.elastic)
        bound, low, high = dual.minimum()
        # They fit except for rounding, in which case the last ones are dropped.
        bought = executed | _first_trees(ops, dual.best_subtrees(high) & ~executed, room)
        # Trees whose best subtree changes within the bracket gain about its price per entry.
        more = (executed | dual.best_subtrees(low)) & ~bought
        bought |= _first_trees(ops, more, room.after(ops, bought & ~executed))
        filled = auction(ops, bought, room.after(ops, bought & ~executed), elastic=self.elastic)
        plain = auction(ops, executed, room, elastic=self.elastic)
        # Compare only the differences, so that equal choices are exactly equal.
        ahead = ops.gain[plain & ~filled].sum() - ops.gain[filled & ~plain].sum()
        result = ops.frontier(start, plain if float(ahead) > 0 else filled)
        # The sums of bound and utility round differently, which must not put the bound below.
        return dataclasses.replace(result, bound=max(bound, result.utility))


def upper_bound(start: Frontier, quota: Tensor | None = None, *, elastic: bool = False) -> float:
    """An upper bound on the utility (`Frontier.utility`) of any allocation from `start`.

    The Lagrangian dual, exact up to rounding of the sums (relative 1e-12), including what `start`
    holds. Divide any allocator's utility by it for a guarantee. Source: ours; departures 9.

    Args:
        start: the operations already bought (the floor); its `budget` is the limit.
        quota: int64 [L, G] entries per head, or None.
        elastic: bound only the allocations that buy no operation of gain <= 0.
    """
    return _Dual(*auction_start(start, quota), elastic=elastic).minimum()[0]


class _Dual:
    """The dual function over the operations that are not executed; prices are per head."""

    def __init__(
        self, ops: Operations, executed: Tensor, room: RemainingBudget, *, elastic: bool
    ) -> None:
        live = ops.offered(executed, elastic=elastic)
        self.ops, self.room = ops, room
        self.held = float(ops.gain[executed].sum())
        self.index = where_true(live)
        self.heads = ops.forest.layers * ops.forest.heads
        self.gain, self.cost = ops.gain[self.index], ops.cost[self.index].double()
        self.head = ops.head(self.index)
        parent = ops.parents_among(self.index)
        # The extra operation after the last one collects what the topmost operations pass up.
        self.parent = torch.where(parent < 0, len(self.index), parent)
        self.top = (parent < 0).nonzero().flatten()
        bounds = torch.tensor(ops.bounds, device=parent.device)
        self.levels = list(pairwise(torch.searchsorted(self.index, bounds).tolist()))

    def _net(self, price: Tensor) -> Tensor:
        """float64 [n]: value of the best subtree rooted at each operation."""
        net = torch.cat([self.gain - self.cost * price[self.head], self.cost.new_zeros(1)])
        for begin, end in reversed(self.levels[1:]):
            net.index_add_(0, self.parent[begin:end], net[begin:end].clamp(min=0))
        return net[:-1]

    def _inside(self, net: Tensor) -> Tensor:
        """bool [n]: operations of the best subtrees."""
        inside = torch.cat([net > 0, torch.ones(1, dtype=torch.bool, device=net.device)])
        for begin, end in self.levels[1:]:
            inside[begin:end] &= inside.index_select(0, self.parent[begin:end])
        return inside[:-1]

    def evaluate(self, price: Tensor) -> tuple[Tensor, Tensor]:
        """Value [L * G] of the best subtrees, net of their price, and their cost in entries."""
        net = self._net(price)
        zeros = self.cost.new_zeros(self.heads)
        value = zeros.index_add(0, self.head[self.top], net[self.top].clamp(min=0))
        return value, zeros.index_add(0, self.head, self.cost * self._inside(net))

    def best_subtrees(self, price: Tensor) -> Tensor:
        """bool [M]: the operations of the best subtrees at `price` [L * G]."""
        result = torch.zeros(len(self.ops), dtype=torch.bool, device=price.device)
        result[self.index[self._inside(self._net(price))]] = True
        return result

    def minimum(self) -> tuple[float, Tensor, Tensor]:
        """The bound, and the lower and higher prices [L * G] of the bracket.

        Subtrees at the higher price fit budget and quotas; at the lower they may not.
        """
        head_price = own_low = own_high = caps = self.cost.new_zeros(self.heads)
        if not len(self.index):
            return self.held, own_low, own_high
        # Slightly above, so that no operation gains at this price despite rounding.
        highest = self.ops.unit[self.index].amax().view(1) * (1 + 2**-40)
        budget = float(self.room.total)
        if self.room.per_head is not None:
            caps = self.room.per_head.double()

            def head_duals(price: Tensor) -> tuple[Tensor, Tensor]:
                value, spent = self.evaluate(price)
                return price * caps + value, caps - spent

            # If its quota binds, a head has its own price above the common one.
            _, head_price, own_low, own_high = _bracket(head_duals, highest.expand(self.heads))

        def dual(price: Tensor) -> tuple[Tensor, Tensor]:
            charged = torch.maximum(price, head_price)
            value, spent = self.evaluate(charged)
            capped = head_price > price
            total = price * budget + ((charged - price) * caps + value).sum()
            return total.view(1), (budget - torch.where(capped, caps, spent).sum()).view(1)

        least, _, low, high = _bracket(dual, highest)
        return self.held + float(least), torch.maximum(low, own_low), torch.maximum(high, own_high)


def _first_trees(ops: Operations, offers: Tensor, room: RemainingBudget) -> Tensor:
    """bool [M]: the part of `offers` in the first trees that fit, per head and then in total."""
    cost = torch.zeros(ops.forest.trees, dtype=torch.int64, device=offers.device)
    cost.index_add_(0, ops.tree, torch.where(offers, ops.cost, 0))
    if room.per_head is not None:
        fits = cost.view(len(room.per_head), -1).cumsum(1) <= room.per_head[:, None]
        cost = torch.where(fits.flatten(), cost, room.total + 1)
    affordable = cost <= room.total
    fits = affordable & (torch.where(affordable, cost, 0).cumsum(0) <= room.total)
    return offers & fits.index_select(0, ops.tree)


def _bracket(
    function: Callable[[Tensor], tuple[Tensor, Tensor]], highest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minimise several convex functions on [0, highest] at once.

    `function` gives values and slopes [S] at points [S], with slope >= 0 at `highest`. Returns the
    smallest values seen, their points, and the last bracket: low points (slope < 0, or point 0) and
    high ones (slope >= 0), which are as good as the best.
    """
    # Point, value and slope at both ends of the bracket.
    low = torch.zeros_like(highest)
    left, right = (torch.stack([point, *function(point)]) for point in (low, highest))
    best = torch.minimum(left[1], right[1])
    best_point = torch.where(left[1] <= right[1], low, highest)
    settled = left[2] >= 0
    right[0] = torch.where(settled, low, highest)
    for iteration in range(_ITERATIONS):
        (low, low_value, low_slope), (high, high_value, high_slope) = left, right
        # The tangents at both ends meet at a lower bound of the minimum.
        run = (high_slope - low_slope).clamp(min=torch.finfo(torch.float64).tiny)
        meet = (low_value - low_slope * low - high_value + high_slope * high) / run
        meet = meet.clamp(low, high)
        floor = torch.maximum(*(value + slope * (meet - x) for x, value, slope in (left, right)))
        tight = (best - floor <= 1e-12 * best) & (high_value - best <= 1e-9 * best)
        if bool((settled | tight | (high <= low)).all()):
            break
        # Tangents alone can converge slowly from one side, so every other step splits the bracket:
        # by orders of magnitude while it spans several.
        spread = torch.where(low > 0, (low * high).sqrt(), high / 1024)
        split = torch.where(low > high / 16, (low + high) / 2, spread)
        point = torch.where(settled, high, meet if iteration % 2 == 0 else split)
        value, slope = function(point)
        best_point = torch.where(value < best, point, best_point)
        best = torch.minimum(best, value)
        here = torch.stack([point, value, slope])
        left = torch.where((slope < 0) & ~settled, here, left)
        right = torch.where((slope >= 0) & ~settled, here, right)
    return best, best_point, left[0], right[0]
