"""`PurchaseQueue`: the operations that the paper's priority queue could still buy."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from gracekv.allocate.operations import Operations, RemainingBudget
from gracekv.allocate.ranking import dense_rank, descending, where_true


class PurchaseQueue:
    """A priority queue over a shortlist: the highest unit utility first, then the tie order.

    What was discarded earlier may be offered again: it did not fit then and fits even less now.

    Args:
        ops: all operations.
        executed: bool [M], what is bought already.
        left: what is left to spend.
        elastic: whether operations of gain <= 0 are never bought.
    """

    def __init__(
        self, ops: Operations, executed: Tensor, left: RemainingBudget, elastic: bool
    ) -> None:
        index = _shortlist(ops, executed, left, elastic)
        # Only these trees can still change, so only they go to the host.
        touched = torch.zeros(ops.forest.trees, dtype=torch.bool, device=index.device)
        touched[ops.tree[index]] = True
        self._local = local = where_true(touched.index_select(0, ops.tree))
        parent = ops.parent[local]
        self._unit, self._cost = ops.unit[local].tolist(), ops.cost[local].tolist()
        self._tree, self._head = ops.tree[local].tolist(), ops.head(local).tolist()
        self._first_token = ops.forest.start[ops.node[local]].tolist()
        # Parents never decrease, so an operation's children are a range.
        self._child_begin = torch.searchsorted(parent, local).tolist()
        self._child_end = torch.searchsorted(parent, local, right=True).tolist()
        self._per_head = None if left.per_head is None else left.per_head.tolist()
        self._elastic, self._executed = elastic, executed
        self._chosen: list[int] = []
        self._queue: list[tuple[float, int, int, int]] = []
        for i in torch.searchsorted(local, index).tolist():
            self._push(i)

    def _push(self, i: int) -> None:
        heapq.heappush(self._queue, (-self._unit[i], self._tree[i], self._first_token[i], i))

    def first(self, total: int) -> tuple[float, int, int] | None:
        """Unit utility, tree and cost of the first operation that `total` entries can pay for.

        What cannot be paid for is discarded, and its descendants with it. None: nothing is left.
        """
        while self._queue:
            negative, tree, _, i = self._queue[0]
            if self._elastic and negative >= 0:
                self._queue.clear()
                break
            cost = self._cost[i]
            if cost <= total and (self._per_head is None or cost <= self._per_head[self._head[i]]):
                return -negative, tree, cost
            heapq.heappop(self._queue)
        return None

    def buy(self) -> None:
        """Execute what `first` returned; its children may follow."""
        i = heapq.heappop(self._queue)[3]
        self._chosen.append(i)
        if self._per_head is not None:
            self._per_head[self._head[i]] -= self._cost[i]
        for child in range(self._child_begin[i], self._child_end[i]):
            self._push(child)

    def executed(self) -> Tensor:
        """bool [M]: what was bought before and from this queue."""
        result = self._executed.clone()
        chosen = torch.tensor(self._chosen, dtype=torch.int64, device=self._local.device)
        result[self._local[chosen]] = True
        return result


def _shortlist(ops: Operations, executed: Tensor, left: RemainingBudget, elastic: bool) -> Tensor:
    """int64, ascending: the available operations that the queue could still buy.

    Among available operations of one cost c (and head, under quotas) at most floor(left / c) can
    be bought, and those are the first ones: an earlier one that did not fit leaves less for them.
    """
    fits = ops.available(executed) & (ops.cost <= left.total)
    if elastic:
        fits &= ops.gain > 0
    if left.per_head is not None:
        fits &= ops.cost <= left.per_head.index_select(0, ops.head())
    index = where_true(fits)
    if not len(index):
        return index
    cost = ops.cost[index]
    if left.per_head is None:
        group, limit = cost, torch.full_like(cost, left.total)
    else:
        head = ops.head(index)
        group = head * (int(cost.max()) + 1) + cost
        limit = left.per_head[head].clamp(max=left.total)
    # One integer that sorts by group, then falling utility, then the tie order.
    count = len(index)
    group = dense_rank(group)
    utility = dense_rank(ops.unit.index_select(0, index), falling=True)
    tie = dense_rank(ops.tie_order(index))
    order = descending(-((group * count + utility) * count + tie))
    ordered = group[order]
    rank = torch.arange(count, device=order.device) - torch.searchsorted(ordered, ordered)
    return index[order[rank < (limit // cost)[order]]].sort().values
