"""`greedy`: the paper's auction, by sorting instead of a priority queue."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from gracekv.allocate.base import ALLOCATORS, Allocator, Frontier
from gracekv.allocate.operations import Operations, RemainingBudget, auction_start
from gracekv.allocate.ranking import buy_in_turn, dense_rank, descending, first_fitting, where_true
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.kernels.ragged import offsets

# A budget that allows everything.
_UNLIMITED = torch.iinfo(torch.int64).max


@ALLOCATORS.register("greedy", works_sharded=True)
class Greedy(Allocator):
    """Buy the highest utility per entry first: the paper's auction in a few sorts.

    Buys exactly what the paper's priority queue buys (`gracekv.allocate.reference.greedy_heap`):
    always the available operation of highest unit utility; one that does not fit is discarded with
    its descendants; ties go to the earlier layer, head, slot and start.

    Let key(a) be the least unit utility among a and its unexecuted ancestors. Without limits the
    queue executes operations by descending key and, within one key, tree by tree. (Once all larger
    keys are done, every available operation has unit utility <= k. The queue takes the first tree
    with one at k; the operations that this makes available are in the same tree, so those of
    utility k or more come next, and all operations of the tree with this key come before those of
    the next tree.)

    So one sort and one running sum find the (key, tree) at which the budget would first be
    exceeded. Everything before it is bought at once. The remaining budget is less than the cost of
    that tree's operations of this key; a queue, which skips operations that do not fit, finishes on
    a shortlist.

    Quotas: the same cut per head gives what the quotas alone would allow. If that fits the budget,
    it is the answer, because the budget rejects nothing. If not, the first operation that the
    budget rejects is one of those, so the cut at the budget runs over them, and the queue finishes
    under both limits.

    Source: Eqs. (A5) to (A8); departures 6. Ours: the parallel form (departures 8), the tie
    order and the clipping of gains.

    Cost: one sort of the V operations and running minima over the levels: O(V log V), well below 1
    % of a prefill.

    Attributes:
        elastic: leave budget unspent rather than buy an operation of gain <= 0 (ours).
    """

    prunable = True

    elastic: bool = False

    def __call__(self, start: Frontier, quota: Tensor | None) -> Frontier:
        ops, executed, left = auction_start(start, quota)
        return ops.frontier(start, auction(ops, executed, left, elastic=self.elastic))


def auction(ops: Operations, executed: Tensor, room: RemainingBudget, *, elastic: bool) -> Tensor:
    """bool [M]: `executed` and everything that the greedy auction adds to it within `room`.

    If heads are sharded over processes, the cut is found over the operations of all of them, and
    their queues act as one.
    """
    if room.total == 0:
        return executed
    key, shard = ops.path_minimum(executed), ops.forest.shard
    # Elastic: at key 0 the path has an operation without gain, which is never bought.
    offers = (key > 0) & ~executed if elastic else ~executed
    if room.per_head is not None:
        # All that quotas alone would allow: each process finishes by itself.
        bought = _within_limits(ops, offers, key, room.per_head)
        unlimited = RemainingBudget(_UNLIMITED, room.per_head).after(ops, bought)
        by_quota = _finish(ops, executed | bought, unlimited, elastic, WHOLE)
        offers = by_quota & ~executed
        if room.after(ops, offers).total >= 0:
            return by_quota
    if shard.ranks == 1:
        bought = _within_limits(ops, offers, key, torch.tensor([room.total], device=key.device))
    else:
        at = where_true(offers)
        trees = _trees_among_all(ops, at, shard)
        fits = first_fitting(key[at], trees, ops.cost[at], room.total, shard)
        bought = torch.zeros_like(executed)
        bought[at[fits]] = True
    return _finish(ops, executed | bought, room.after(ops, bought), elastic, shard)


def _trees_among_all(ops: Operations, index: Tensor, shard: HeadShard) -> Tensor:
    """int64 [n]: the trees of the operations at `index` [n], numbered over all processes."""
    return shard.among_all(ops.tree[index], ops.forest.heads * ops.forest.slots)


def _within_limits(ops: Operations, offers: Tensor, key: Tensor, limits: Tensor) -> Tensor:
    """bool [M]: the part of `offers` before the first (key, tree) above its group's limit.

    `limits` is int64 [S]: the trees fall into S groups of equal size (all, or one per head).
    """
    # Other operations are sorted last (utilities are >= 0) and cost nothing.
    key, cost = torch.where(offers, key, -1.0), torch.where(offers, ops.cost, 0)
    tree, groups = ops.tree, len(limits)
    group = None if groups == 1 else tree // (ops.forest.trees // groups)
    order = descending(key)
    if group is not None:
        order = order[torch.sort(group.index_select(0, order), stable=True).indices]
    running = offsets(cost.index_select(0, order))

    # Per group: its start in the order, and the first place beyond its limit.
    begins = torch.zeros_like(limits)
    ends = torch.full_like(limits, len(order))
    if group is not None:
        ends = torch.bincount(group, minlength=groups).cumsum(0)
        begins[1:] = ends[:-1]
    beyond = torch.searchsorted(running[1:], running[begins] + limits, right=True)
    threshold = torch.where(beyond < ends, key[order[beyond.clamp(max=len(order) - 1)]], -1.0)

    bound = threshold if group is None else threshold.index_select(0, group)
    above = key > bound
    tied = (key == bound) & offers
    # Among operations of the key at the cut, trees are processed one after the other.
    tied_cost = torch.zeros(ops.forest.trees, dtype=torch.int64, device=key.device)
    tied_cost.index_add_(0, tree, torch.where(tied, cost, 0))
    paid = torch.where(above, cost, 0)
    spent = (
        paid.sum().view(1) if group is None else begins.new_zeros(groups).index_add_(0, group, paid)
    )
    total = tied_cost.view(groups, -1).cumsum(1) + spent[:, None]
    return above | (tied & (total <= limits[:, None]).flatten().index_select(0, tree))


def _finish(
    ops: Operations, executed: Tensor, room: RemainingBudget, elastic: bool, shard: HeadShard
) -> Tensor:
    """bool [M]: `executed` and what the priority queue adds to it, run on a shortlist.

    The queue holds the highest unit utility first, then the tie order. A discarded operation may be
    offered again; it still does not fit.
    """
    if room.total == 0:
        return executed
    index = _shortlist(ops, executed, room, elastic)
    # Only these trees can still change, so only they are copied to the host.
    touched = torch.zeros(ops.forest.trees, dtype=torch.bool, device=index.device)
    touched[ops.tree[index]] = True
    local = where_true(touched.index_select(0, ops.tree))
    parent = ops.parent[local]
    columns = [
        ops.cost[local],
        ops.head(local),
        _trees_among_all(ops, local, shard),
        ops.forest.start[ops.node[local]],
        # Parents never decrease, so an operation's children are a range.
        torch.searchsorted(parent, local),
        torch.searchsorted(parent, local, right=True),
    ]
    cost, head, trees, first_token, child_begin, child_end = torch.stack(columns).tolist()
    negative_unit = (-ops.unit[local]).tolist()
    order = list(zip(negative_unit, trees, first_token, range(len(local)), strict=True))
    per_head = None if room.per_head is None else room.per_head.tolist()
    chosen = list[int]()
    queue = [order[i] for i in torch.searchsorted(local, index).tolist()]
    heapq.heapify(queue)

    def first(total: int) -> tuple[float, int, int] | None:
        """Unit utility, tree and cost of the first operation that fits in `total` entries.

        Operations that cost more are discarded with their descendants. None if nothing is left.
        """
        while queue:
            negative, tree, _, i = queue[0]
            if elastic and negative >= 0:
                break
            if cost[i] <= total and (per_head is None or cost[i] <= per_head[head[i]]):
                return -negative, tree, cost[i]
            heapq.heappop(queue)
        return None

    def buy() -> None:
        """Execute what `first` returned; its children may follow."""
        i = heapq.heappop(queue)[3]
        chosen.append(i)
        if per_head is not None:
            per_head[head[i]] -= cost[i]
        for child in range(child_begin[i], child_end[i]):
            heapq.heappush(queue, order[child])

    buy_in_turn(first, buy, room.total, shard)
    result = executed.clone()
    result[local[torch.tensor(chosen, dtype=torch.int64, device=local.device)]] = True
    return result


def _shortlist(ops: Operations, executed: Tensor, room: RemainingBudget, elastic: bool) -> Tensor:
    """int64, ascending: the available operations that the queue could still buy.

    Among available operations of one cost c (and head, under quotas), at most floor(left / c) can
    be bought, and these are the first ones: if an earlier one does not fit, nor do later ones.
    """
    fits = ops.available(executed) & (ops.cost <= room.total)
    if elastic:
        fits &= ops.gain > 0
    if room.per_head is not None:
        fits &= ops.cost <= room.per_head.index_select(0, ops.head())
    index = where_true(fits)
    if not len(index):
        return index
    cost = ops.cost[index]
    if room.per_head is None:
        group, limit = cost, torch.full_like(cost, room.total)
    else:
        head = ops.head(index)
        group = head * (int(cost.max()) + 1) + cost
        limit = room.per_head[head].clamp(max=room.total)
    # One integer that sorts by group, then descending utility, then the tie order.
    count = len(index)
    group = dense_rank(group)
    utility = dense_rank(ops.unit.index_select(0, index), falling=True)
    order = descending(-((group * count + utility) * count + dense_rank(ops.tie_order(index))))
    ordered = group[order]
    rank = torch.arange(count, device=order.device) - torch.searchsorted(ordered, ordered)
    return index[order[rank < (limit // cost)[order]]].sort().values
