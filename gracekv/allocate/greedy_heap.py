"""`greedy_heap`: the auction with a priority queue, as the paper describes it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gracekv.allocate.base import ALLOCATORS, Allocator, Frontier
from gracekv.allocate.operations import Operations, RemainingBudget


@final
@ALLOCATORS.register("greedy_heap")
@dataclass(frozen=True, slots=False)
class GreedyHeap(Allocator):
    """Best utility per entry first, one operation at a time (the reference of `greedy`).

    Pops the available operation of the highest unit utility; ties go to the earlier layer, head,
    slot and start. One that does not fit the budget or its head's quota is discarded for good,
    and its descendants with it; the search goes on with the rest.

    Source: Eqs. (A5), (A6) and (A7) and the
    appendix on the greedy allocator; departures 6. Ours: the tie order and the clipping of gains.

    Cost: O(V log V) for V operations, one at a time in Python.

    Attributes:
        elastic: leave budget unspent rather than buy an operation of gain <= 0 (ours).
    """

    prunable: ClassVar[bool] = True

    elastic: bool = False

    def __call__(self, start: Frontier, quota: Tensor | None) -> Frontier:
        ops = Operations.of(start.forest)
        purse = RemainingBudget.of(ops, start, quota)
        budget = purse.budget
        room = None if purse.room is None else purse.room.tolist()
        done = ops.executed(start).tolist()
        unit, cost, parent = ops.unit.tolist(), ops.cost.tolist(), ops.parent.tolist()
        tree, head = ops.tree.tolist(), ops.head().tolist()
        first_token = start.forest.start[ops.node].tolist()
        children: list[list[int]] = [[] for _ in unit]
        for op, before in enumerate(parent):
            if before >= 0:
                children[before].append(op)

        # Nodes of one tree that are open at the same time do not overlap, so tree and start
        # decide every tie.
        queue = [
            (-unit[op], tree[op], first_token[op], op)
            for op in range(len(ops))
            if not done[op] and (parent[op] < 0 or done[parent[op]])
        ]
        heapq.heapify(queue)
        while queue and budget > 0:
            negative, _, _, op = heapq.heappop(queue)
            if self.elastic and negative >= 0:
                break
            if cost[op] > budget or (room is not None and cost[op] > room[head[op]]):
                continue
            done[op] = True
            budget -= cost[op]
            if room is not None:
                room[head[op]] -= cost[op]
            for child in children[op]:
                heapq.heappush(queue, (-unit[child], tree[child], first_token[child], child))
        return ops.frontier(start, torch.tensor(done, dtype=torch.bool, device=ops.cost.device))
