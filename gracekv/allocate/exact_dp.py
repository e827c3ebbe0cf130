"""`exact_dp`: the optimum by dynamic programming over budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from gracekv.allocate.base import ALLOCATORS, Allocator, Frontier
from gracekv.allocate.greedy import auction
from gracekv.allocate.operations import Operations, RemainingBudget
from gracekv.allocate.small import SmallProblem
from gracekv.errors import ConfigError


@final
@ALLOCATORS.register("exact_dp")
@dataclass(frozen=True, slots=False)
class ExactDP(Allocator):
    """The optimum by a tree knapsack over all budgets (small forests; a check on the others).

    With the operations in pre-order, the best value of the operations from i on within b entries
    is the better of skipping i with its whole subtree and of taking it. Under quotas each head
    has such a table of its own, and a second one shares the budget out among the heads. What
    budget is left, the greedy auction spends (on operations without gain).

    Source: Eq. (A8). Ours: the algorithm.

    Cost: time and memory are proportional to operations times budget.

    Attributes:
        elastic: leave budget unspent rather than buy an operation of gain <= 0 (ours).
        max_operations: largest number of open operations that is attempted (ours).
        max_cells: largest table, operations times budget (ours; 8 bytes each).

    Raises:
        ConfigError: a field lies outside what it takes, or the problem outgrows a limit.
    """

    elastic: bool = False
    max_operations: int = 2_000
    max_cells: int = 20_000_000

    def __post_init__(self) -> None:
        if self.max_operations < 1 or self.max_cells < 1:
            raise ConfigError(
                f"ExactDP takes max_operations >= 1 and max_cells >= 1; got {self!r}."
            )

    def __call__(self, start: Frontier, quota: Tensor | None) -> Frontier:
        ops = Operations.of(start.forest)
        executed = ops.executed(start)
        purse = RemainingBudget.of(ops, start, quota)
        problem = SmallProblem.of(
            ops, executed, elastic=self.elastic, most=self.max_operations, solver="ExactDP"
        )
        budget = min(purse.budget, int(problem.cost.sum()))
        cells = (len(problem.cost) + 1) * (budget + 1)
        if cells > self.max_cells:
            raise ConfigError(
                f"ExactDP needs a table of {cells} cells for this budget; max_cells is "
                f"{self.max_cells}. Raise it if the memory is there, or use 'milp'."
            )
        bought = problem.chosen(executed, _solve(problem, budget, purse.room))
        left = purse.less(ops, bought & ~executed)
        return ops.frontier(start, auction(ops, bought, left, elastic=self.elastic))


def _solve(problem: SmallProblem, budget: int, room: Tensor | None) -> np.ndarray:
    """bool [n]: an optimal choice."""
    take = np.zeros(len(problem.cost), dtype=bool)
    if room is None:
        parts = [(slice(0, len(take)), budget)]
    else:
        edges = np.searchsorted(problem.head, np.arange(len(room) + 1))
        parts = [
            (slice(int(begin), int(end)), min(cap, budget))
            for begin, end, cap in zip(edges[:-1], edges[1:], room.tolist(), strict=True)
        ]
    tables = [_table(problem, part, cap) for part, cap in parts]

    # best[i][b]: value of parts i, i+1, ... within b entries; share[i][b]: what part i gets of b.
    best = np.zeros(budget + 1)
    shares = []
    for table in reversed(tables):
        value = np.full(budget + 1, -np.inf)
        share = np.zeros(budget + 1, dtype=np.int64)
        for given, own in enumerate(table[0]):
            mixed = own + best[: budget + 1 - given]
            better = mixed > value[given:]
            value[given:][better] = mixed[better]
            share[given:][better] = given
        best = value
        shares.append(share)
    left = budget
    for (part, _), table, share in zip(parts, tables, reversed(shares), strict=True):
        given = int(share[left])
        left -= given
        take[part] = _trace(problem, part, table, given)
    return take


def _subtree_ends(problem: SmallProblem, part: slice) -> list[int]:
    """For each operation of `part`, counted from its begin: where its subtree ends."""
    count = part.stop - part.start
    ends = list(range(1, count + 1))
    for i in range(count - 1, -1, -1):
        above = int(problem.parent[part.start + i])
        if above >= 0:
            ends[above - part.start] = max(ends[above - part.start], ends[i])
    return ends


def _table(problem: SmallProblem, part: slice, cap: int) -> np.ndarray:
    """float64 [n + 1, cap + 1]: best value of the operations from i on within b entries."""
    ends = _subtree_ends(problem, part)
    table = np.zeros((len(ends) + 1, cap + 1))
    for i in range(len(ends) - 1, -1, -1):
        gain, cost = problem.gain[part.start + i], int(problem.cost[part.start + i])
        table[i] = table[ends[i]]
        if cost <= cap:
            np.maximum(table[i, cost:], table[i + 1, : cap + 1 - cost] + gain, out=table[i, cost:])
    return table


def _trace(problem: SmallProblem, part: slice, table: np.ndarray, left: int) -> np.ndarray:
    """bool [n]: the choice behind table[0, left]."""
    ends = _subtree_ends(problem, part)
    take = np.zeros(len(ends), dtype=bool)
    i = 0
    while i < len(ends):
        if table[i, left] == table[ends[i], left]:
            i = ends[i]
        else:
            take[i] = True
            left -= int(problem.cost[part.start + i])
            i += 1
    return take
