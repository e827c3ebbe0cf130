"""`exact_dp`: the optimum by dynamic programming over budgets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gracekv.allocate.base import ALLOCATORS, Allocator, Frontier
from gracekv.allocate.greedy import auction
from gracekv.allocate.operations import Operations, auction_start
from gracekv.errors import ConfigError
from gracekv.registry import bounded


@ALLOCATORS.register("exact_dp")
class ExactDP(Allocator):
    """Find the optimum by a tree knapsack over all budgets (for small forests, as a check).

    With the operations in pre-order, the best value of the operations from i on within b entries is
    the better of skipping i with its whole subtree and taking it. Under quotas each head has its
    own table, and a second table divides the budget among the heads. The greedy auction spends the
    rest on operations without gain.

    Source: Eq. (A8). Ours: the algorithm.

    Cost: time and memory are proportional to operations times budget.

    Attributes:
        elastic: leave budget unspent rather than buy an operation of gain <= 0 (ours).
        max_cells: maximum size of the table, operations times budget (ours; 8 bytes each).

    Raises:
        ConfigError: the table would exceed the limit.
    """

    elastic: bool = False
    max_cells: int = bounded(20_000_000, at_least=1)
    removed_fields = (("max_operations", 2_000),)

    def __call__(self, start: Frontier, quota: Tensor | None) -> Frontier:
        ops, executed, room = auction_start(start, quota)
        problem = _Problem.of(ops, ops.offered(executed, elastic=self.elastic))
        budget = min(room.total, int(problem.cost.sum()))
        if (cells := (len(problem.cost) + 1) * (budget + 1)) > self.max_cells:
            raise ConfigError(
                f"ExactDP needs a table of {cells} cells for this budget; max_cells is "
                f"{self.max_cells}. Raise it if there is enough memory, or use 'greedy' or "
                f"'lagrangian', whose bound shows how far from optimal it is."
            )
        bought = executed.clone()
        taken = torch.from_numpy(_solve(problem, budget, room.per_head))
        bought[problem.index[taken.to(executed.device)]] = True
        rest = room.after(ops, bought & ~executed)
        return ops.frontier(start, auction(ops, bought, rest, elastic=self.elastic))


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """The n operations that may still be bought, in pre-order, head after head.

    Attributes:
        index: int64 [n], their indices among all operations.
        end: int64 [n], where the subtree of each ends.
        gain: float64 [n], clipped at 0.
        cost: int64 [n].
        head: int64 [n].
    """

    index: Tensor
    end: np.ndarray
    gain: np.ndarray
    cost: np.ndarray
    head: np.ndarray

    @classmethod
    def of(cls, ops: Operations, offered: Tensor) -> _Problem:
        """The operations that are `offered` (bool [M])."""
        index = offered.nonzero().flatten()
        index = index[torch.argsort(ops.tie_order(index))] if len(index) else index
        columns = ops.parents_among(index), ops.gain[index], ops.cost[index], ops.head(index)
        parent, *rest = (column.cpu().numpy() for column in columns)
        end = np.arange(1, len(index) + 1)
        for i in range(len(index) - 1, -1, -1):
            if parent[i] >= 0:
                end[parent[i]] = max(end[parent[i]], end[i])
        return cls(index, end, *rest)


def _solve(problem: _Problem, budget: int, caps: Tensor | None) -> np.ndarray:
    """bool [n]: an optimal choice."""
    take = np.zeros(len(problem.cost), dtype=bool)
    edges, most = [0, len(take)], [budget]
    if caps is not None:
        edges = np.searchsorted(problem.head, np.arange(len(caps) + 1)).tolist()
        most = caps.clamp(max=budget).tolist()
    parts = [(slice(*ends), cap) for ends, cap in zip(pairwise(edges), most, strict=True)]
    tables = [_table(problem, part, cap) for part, cap in parts]

    # best[i][b]: value of parts i, i+1, ... within b entries; share[i][b]: part i's share of b.
    best = np.zeros(budget + 1)
    shares = []
    for table in reversed(tables):
        value = np.full(budget + 1, -np.inf)
        share = np.zeros(budget + 1, dtype=np.int64)
        for spend, gain in enumerate(table[0]):
            mixed = gain + best[: budget + 1 - spend]
            better = mixed > value[spend:]
            value[spend:][better] = mixed[better]
            share[spend:][better] = spend
        best = value
        shares.append(share)
    room = budget
    for (part, _), table, share in zip(parts, tables, reversed(shares), strict=True):
        spend = int(share[room])
        room -= spend
        take[part] = _trace(problem, part, table, spend)
    return take


def _table(problem: _Problem, part: slice, cap: int) -> np.ndarray:
    """float64 [n + 1, cap + 1]: best value of the operations from i on within b entries."""
    ends = problem.end[part] - part.start
    table = np.zeros((len(ends) + 1, cap + 1))
    for i in range(len(ends) - 1, -1, -1):
        gain, cost = problem.gain[part.start + i], int(problem.cost[part.start + i])
        table[i] = table[ends[i]]
        if cost <= cap:
            np.maximum(table[i, cost:], table[i + 1, : cap + 1 - cost] + gain, out=table[i, cost:])
    return table


def _trace(problem: _Problem, part: slice, table: np.ndarray, room: int) -> np.ndarray:
    """bool [n]: the choice behind table[0, room]."""
    ends = problem.end[part] - part.start
    take = np.zeros(len(ends), dtype=bool)
    i = 0
    while i < len(ends):
        if table[i, room] == table[ends[i], room]:
            i = ends[i]
        else:
            take[i] = True
            room -= int(problem.cost[part.start + i])
            i += 1
    return take
