"""`greedy`: the auction of `greedy_heap` with sorts in place of the queue."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from gracekv.allocate.base import ALLOCATORS, Allocator, Frontier
from gracekv.allocate.operations import Operations, RemainingBudget
from gracekv.allocate.ranking import dense_rank, descending, positions


@final
@ALLOCATORS.register("greedy")
@dataclass(frozen=True, slots=False)
class Greedy(Allocator):
    """Best utility per entry first, all at once; buys exactly what `greedy_heap` buys.

    Let key(a) be the least unit utility among a and its unexecuted ancestors. Without limits the
    queue executes operations by descending key and, inside one key, tree by tree. (Once all larger
    keys are done, every open operation has unit utility <= k. The queue takes the first tree with
    one at k; whatever that opens lies in the same tree and has a higher utility, or the same and
    the earlier tree, so the tree's whole share of the key comes before the next tree.)

    So one sort and one running sum find the (key, tree) at which the budget would first be
    exceeded. All before it is bought at once. What is left then is less than that one tree's
    share costs, and the real queue, which skips what does not fit, finishes on a shortlist.

    Quotas: the same cut per head gives what the quotas alone would allow. If that fits the budget
    it is the answer, because the budget then never refused anything. If not, the first refusal by
    the budget falls on one of those operations, so the cut at the budget runs over them, and the
    queue finishes under both limits.

    Source: `greedy_heap`, the paper's queue; departures 8. Ours: the parallel form.

    Cost: one sort of the V operations and running minima down the levels: O(V log V), well below
    1 % of a prefill.

    Attributes:
        elastic: leave budget unspent rather than buy an operation of gain <= 0 (ours).
    """

    prunable: ClassVar[bool] = True

    elastic: bool = False

    def __call__(self, start: Frontier, quota: Tensor | None) -> Frontier:
        ops = Operations.of(start.forest)
        purse = RemainingBudget.of(ops, start, quota)
        return ops.frontier(start, auction(ops, ops.executed(start), purse, elastic=self.elastic))


def auction(ops: Operations, executed: Tensor, purse: RemainingBudget, *, elastic: bool) -> Tensor:
    """bool [M]: `executed` and everything that the greedy auction adds to it within `purse`."""
    if purse.budget == 0:
        return executed
    key = ops.bottleneck(executed)
    # Elastic: at key 0 the path holds an operation without gain, which is never bought.
    wanted = (key > 0) & ~executed if elastic else ~executed
    if purse.room is None:
        limit = torch.tensor([purse.budget], device=key.device)
        bought = _cut(ops, wanted, key, limit)
        return _finish(ops, executed | bought, purse.less(ops, bought), elastic)
    bought = _cut(ops, wanted, key, purse.room)
    # The costs of all operations together: a budget that cannot refuse any.
    endless = RemainingBudget(int(ops.cost.sum()), purse.room)
    alone = _finish(ops, executed | bought, endless.less(ops, bought), elastic)
    bought = alone & ~executed
    if purse.less(ops, bought).budget >= 0:
        return alone
    bought = _cut(ops, bought, key, torch.tensor([purse.budget], device=key.device))
    return _finish(ops, executed | bought, purse.less(ops, bought), elastic)


def _cut(ops: Operations, wanted: Tensor, key: Tensor, limits: Tensor) -> Tensor:
    """bool [M]: of `wanted`, all before the first (key, tree) that exceeds its group's limit.

    `limits` is int64 [S]: the trees fall into S groups of equal size (all, or one per head).
    """
    # What is not wanted sorts last (utilities are >= 0) and costs nothing.
    key, cost = torch.where(wanted, key, -1.0), torch.where(wanted, ops.cost, 0)
    tree, groups = ops.tree, len(limits)
    group = None if groups == 1 else tree // (ops.forest.trees // groups)
    order = descending(key)
    if group is not None:
        order = order[torch.sort(group.index_select(0, order), stable=True).indices]
    running = torch.cat([cost.new_zeros(1), cost.index_select(0, order).cumsum(0)])

    # Per group: where it begins in the order, and the first place beyond its limit.
    begins = torch.zeros_like(limits)
    ends = torch.full_like(limits, len(order))
    if group is not None:
        ends = torch.bincount(group, minlength=groups).cumsum(0)
        begins[1:] = ends[:-1]
    beyond = torch.searchsorted(running[1:], running[begins] + limits, right=True)
    last = order[beyond.clamp(max=len(order) - 1)]
    threshold = torch.where(beyond < ends, key[last], -1.0)

    bar = threshold if group is None else threshold.index_select(0, group)
    above = key > bar
    tied = (key == bar) & wanted
    # Inside the key at the cut, trees come one after the other.
    share = torch.zeros(ops.forest.trees, dtype=torch.int64, device=key.device)
    share.index_add_(0, tree, torch.where(tied, cost, 0))
    paid = torch.where(above, cost, 0)
    spent = (
        paid.sum().view(1) if group is None else begins.new_zeros(groups).index_add_(0, group, paid)
    )
    total = share.view(groups, -1).cumsum(1) + spent[:, None]
    fits = (total <= limits[:, None]).flatten()
    return above | (tied & fits.index_select(0, tree))


def _finish(ops: Operations, executed: Tensor, purse: RemainingBudget, elastic: bool) -> Tensor:
    """bool [M]: the queue's own continuation from `executed`, on the few that can matter.

    Discards made earlier need no memory: what did not fit once fits even less now.
    """
    if purse.budget == 0:
        return executed
    index = _shortlist(ops, executed, purse, elastic)
    if not len(index):
        return executed
    # Only these trees can still change: bring them, and nothing else, to the host.
    touched = torch.zeros(ops.forest.trees, dtype=torch.bool, device=index.device)
    touched[ops.tree[index]] = True
    local = positions(touched.index_select(0, ops.tree))
    op_id, parent = local.cpu().numpy(), ops.parent[local].cpu().numpy()
    unit, cost = ops.unit[local].tolist(), ops.cost[local].tolist()
    tree, head = ops.tree[local].tolist(), ops.head(local).tolist()
    first_token = ops.forest.start[ops.node[local]].tolist()
    # Parents never decrease, so an operation's children are a range.
    child_begin = np.searchsorted(parent, op_id, side="left").tolist()
    child_end = np.searchsorted(parent, op_id, side="right").tolist()

    queue = [
        (-unit[i], tree[i], first_token[i], i) for i in torch.searchsorted(local, index).tolist()
    ]
    heapq.heapify(queue)
    budget = purse.budget
    room = None if purse.room is None else purse.room.tolist()
    chosen = []
    while queue and budget > 0:
        negative, _, _, i = heapq.heappop(queue)
        if elastic and negative >= 0:
            break
        if cost[i] > budget or (room is not None and cost[i] > room[head[i]]):
            continue
        chosen.append(i)
        budget -= cost[i]
        if room is not None:
            room[head[i]] -= cost[i]
        for child in range(child_begin[i], child_end[i]):
            heapq.heappush(queue, (-unit[child], tree[child], first_token[child], child))
    result = executed.clone()
    result[local[torch.tensor(chosen, dtype=torch.int64, device=local.device)]] = True
    return result


def _shortlist(ops: Operations, executed: Tensor, purse: RemainingBudget, elastic: bool) -> Tensor:
    """int64, ascending: the available operations that the queue could still buy.

    Among available operations of one cost c (and head, under quotas) at most floor(left / c) can
    be bought, and those are the first ones: an earlier one that did not fit leaves less for them.
    """
    budget = purse.budget
    fits = ops.available(executed) & (ops.cost <= budget)
    if elastic:
        fits &= ops.gain > 0
    if purse.room is not None:
        fits &= ops.cost <= purse.room.index_select(0, ops.head())
    index = positions(fits)
    if not len(index):
        return index
    cost = ops.cost[index]
    if purse.room is None:
        group, left = cost, torch.full_like(cost, budget)
    else:
        head = ops.head(index)
        group = head * (int(cost.max()) + 1) + cost
        left = purse.room[head].clamp(max=budget)
    # One integer that sorts by group, then falling utility, then the tie order.
    count = len(index)
    group = dense_rank(group)
    utility = dense_rank(ops.unit.index_select(0, index), falling=True)
    turn = dense_rank(ops.sequence(index))
    order = descending(-((group * count + utility) * count + turn))
    ordered = group[order]
    rank = torch.arange(count, device=order.device) - torch.searchsorted(ordered, ordered)
    return index[order[rank < (left // cost)[order]]].sort().values
