"""`greedy`: the paper's auction, from sorts in place of a priority queue."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gracekv.allocate.base import ALLOCATORS, Allocator, Frontier
from gracekv.allocate.global_cut import first_fitting, first_offer
from gracekv.allocate.operations import Operations, RemainingBudget
from gracekv.allocate.purchase_queue import PurchaseQueue
from gracekv.allocate.ranking import descending, where_true
from gracekv.distributed.head_shard import HeadShard
from gracekv.kernels.ragged import offsets


@final
@ALLOCATORS.register("greedy")
@dataclass(frozen=True, slots=False)
class Greedy(Allocator):
    """Best utility per entry first: the paper's auction, all at once.

    Buys exactly what the paper's priority queue buys (`gracekv.allocate.reference.greedy_heap`):
    of the available operations the one of highest unit utility; one that does not fit is discarded
    with its descendants; ties go to the earlier layer, head, slot and start.

    Let key(a) be the least unit utility among a and its unexecuted ancestors. Without limits the
    queue executes operations by descending key and, inside one key, tree by tree. (Once all larger
    keys are done, every available operation has unit utility <= k. The queue takes the first tree
    with one at k; whatever that makes available lies in the same tree and has a higher utility, or
    the same and the earlier tree, so all operations of the tree with this key come before those of
    the next tree.)

    So one sort and one running sum find the (key, tree) at which the budget would first be
    exceeded. All before it is bought at once. What is left then is less than that tree's operations
    of this key cost, and a queue, which skips what does not fit, finishes on a shortlist.

    Quotas: the same cut per head gives what the quotas alone would allow. If that fits the budget
    it is the answer, because the budget then refuses nothing. If not, the first operation that the
    budget refuses is one of those, so the cut at the budget runs over them, and the queue finishes
    under both limits.

    Source: Eqs. (A5), (A6) and (A7); departures 6. Ours: the parallel form (departures 8), the tie
    order and the clipping of gains.

    Cost: one sort of the V operations and running minima down the levels: O(V log V), well below
    1 % of a prefill.

    Attributes:
        elastic: leave budget unspent rather than buy an operation of gain <= 0 (ours).
    """

    works_sharded: ClassVar[bool] = True
    prunable: ClassVar[bool] = True

    elastic: bool = False

    def __call__(self, start: Frontier, quota: Tensor | None) -> Frontier:
        ops = Operations.of(start.forest)
        left = RemainingBudget.of(ops, start, quota)
        executed, shard = ops.executed(start), start.forest.shard
        if shard is not None:
            # What the floors of all processes left over.
            total = start.budget - shard.total(start.budget - left.total)
            left = dataclasses.replace(left, total=total)
            return ops.frontier(
                start, auction_over_processes(ops, executed, left, shard, elastic=self.elastic)
            )
        return ops.frontier(start, auction(ops, executed, left, elastic=self.elastic))


def auction(ops: Operations, executed: Tensor, left: RemainingBudget, *, elastic: bool) -> Tensor:
    """bool [M]: `executed` and everything that the greedy auction adds to it within `left`."""
    if left.total == 0:
        return executed
    key = ops.path_minimum(executed)
    # Elastic: at key 0 the path holds an operation without gain, which is never bought.
    wanted = (key > 0) & ~executed if elastic else ~executed
    if left.per_head is None:
        limit = torch.tensor([left.total], device=key.device)
        bought = _cut(ops, wanted, key, limit)
        return _finish(ops, executed | bought, left.after(ops, bought), elastic)
    bought = _cut(ops, wanted, key, left.per_head)
    # The costs of all operations together: a budget that cannot refuse any.
    unlimited = RemainingBudget(int(ops.cost.sum()), left.per_head)
    by_quota = _finish(ops, executed | bought, unlimited.after(ops, bought), elastic)
    bought = by_quota & ~executed
    if left.after(ops, bought).total >= 0:
        return by_quota
    bought = _cut(ops, bought, key, torch.tensor([left.total], device=key.device))
    return _finish(ops, executed | bought, left.after(ops, bought), elastic)


def auction_over_processes(
    ops: Operations, executed: Tensor, left: RemainingBudget, shard: HeadShard, *, elastic: bool
) -> Tensor:
    """`auction` of one budget in all processes; bool [M], of this process's operations.

    The cut is found among the operations of all, and the queues of all go on as one: the first of
    their first operations is bought, in turn.

    Args:
        ops: of this process's heads.
        executed: bool [M].
        left: `total` of all processes, `per_head` of this one's heads.
        shard: reaches the other processes.
        elastic: whether operations of gain <= 0 are never bought.
    """
    if left.total == 0:
        return executed
    key = ops.path_minimum(executed)
    wanted = (key > 0) & ~executed if elastic else ~executed
    if left.per_head is not None:
        # What the quotas alone would allow needs no other process.
        unlimited = RemainingBudget(int(ops.cost.sum()), left.per_head)
        wanted = auction(ops, executed, unlimited, elastic=elastic) & ~executed
    at = where_true(wanted)
    tree, slots = ops.tree[at], ops.forest.slots
    place = shard.among_all(tree // slots, ops.forest.heads) * slots + tree % slots
    fits = first_fitting(key[at], place, ops.cost[at], left.total, shard)
    bought = torch.zeros_like(executed)
    bought[at[fits]] = True
    own = left.after(ops, bought)
    total = left.total - shard.total(left.total - own.total)
    queue = PurchaseQueue(ops, executed | bought, RemainingBudget(total, own.per_head), elastic)
    while total > 0:
        found, offer = queue.first(total), None
        if found is not None:
            unit, number, cost = found
            head = shard.among_all(torch.tensor(number // slots), ops.forest.heads)
            offer = unit, int(head) * slots + number % slots, cost
        first = first_offer(offer, shard)
        if first is None:
            break
        rank, price = first
        total -= price
        if rank == shard.rank:
            queue.buy()
    return queue.executed()


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
    running = offsets(cost.index_select(0, order))

    # Per group: where it begins in the order, and the first place beyond its limit.
    begins = torch.zeros_like(limits)
    ends = torch.full_like(limits, len(order))
    if group is not None:
        ends = torch.bincount(group, minlength=groups).cumsum(0)
        begins[1:] = ends[:-1]
    beyond = torch.searchsorted(running[1:], running[begins] + limits, right=True)
    last = order[beyond.clamp(max=len(order) - 1)]
    threshold = torch.where(beyond < ends, key[last], -1.0)

    own = threshold if group is None else threshold.index_select(0, group)
    above = key > own
    tied = (key == own) & wanted
    # Among operations of the key at the cut, trees come one after the other.
    tied_cost = torch.zeros(ops.forest.trees, dtype=torch.int64, device=key.device)
    tied_cost.index_add_(0, tree, torch.where(tied, cost, 0))
    paid = torch.where(above, cost, 0)
    spent = (
        paid.sum().view(1) if group is None else begins.new_zeros(groups).index_add_(0, group, paid)
    )
    total = tied_cost.view(groups, -1).cumsum(1) + spent[:, None]
    fits = (total <= limits[:, None]).flatten()
    return above | (tied & fits.index_select(0, tree))


def _finish(ops: Operations, executed: Tensor, left: RemainingBudget, elastic: bool) -> Tensor:
    """bool [M]: what the priority queue makes of `executed`, run on a shortlist."""
    if left.total == 0:
        return executed
    queue, total = PurchaseQueue(ops, executed, left, elastic), left.total
    while (best := queue.first(total)) is not None:
        queue.buy()
        total -= best[2]
    return queue.executed()
