"""`milp`: the allocation problem as an integer program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from gracekv.allocate.base import ALLOCATORS, Allocator, Frontier
from gracekv.allocate.greedy import auction
from gracekv.allocate.operations import Operations, RemainingBudget
from gracekv.allocate.small import SmallProblem
from gracekv.errors import ConfigError, GracekvError


@final
@ALLOCATORS.register("milp")
@dataclass(frozen=True, slots=False)
class Milp(Allocator):
    """The optimum by a mixed-integer solver (small forests; a check on the others).

    One 0/1 variable per operation, x_a <= x_parent(a), and one row per budget or quota. What
    budget is left, the greedy auction spends (on operations without gain).

    Source: Eq. (A8). Ours: the solver (scipy's HiGHS).

    Cost: exponential at worst; one variable an operation.

    Attributes:
        elastic: leave budget unspent rather than buy an operation of gain <= 0 (ours).
        max_operations: largest number of open operations that is attempted (ours).

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    elastic: bool = False
    max_operations: int = 5_000

    def __post_init__(self) -> None:
        if self.max_operations < 1:
            raise ConfigError(f"Milp.max_operations is at least 1; got {self.max_operations}.")

    def __call__(self, start: Frontier, quota: Tensor | None) -> Frontier:
        ops = Operations.of(start.forest)
        executed = ops.executed(start)
        purse = RemainingBudget.of(ops, start, quota)
        problem = SmallProblem.of(
            ops, executed, elastic=self.elastic, most=self.max_operations, solver="Milp"
        )
        bought = problem.chosen(executed, _solve(problem, purse))
        left = purse.less(ops, bought & ~executed)
        return ops.frontier(start, auction(ops, bought, left, elastic=self.elastic))


def _solve(problem: SmallProblem, purse: RemainingBudget) -> np.ndarray:
    """bool [n]: an optimal choice."""
    # Importing scipy's solvers changes the warning filters, so only who solves imports them.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    count = len(problem.gain)
    # Gains may be tiny against the solver's absolute tolerances.
    largest = problem.gain.max(initial=0.0)
    if largest == 0 or purse.budget == 0:
        return np.zeros(count, dtype=bool)
    places = np.arange(count)
    child = places[problem.parent >= 0]
    parent = problem.parent[child]
    rows = [np.repeat(np.arange(len(child)), 2)]
    columns = [np.stack([child, parent], 1).ravel()]
    entries = [np.tile([1.0, -1.0], len(child))]
    limits = [np.zeros(len(child)), np.array([float(purse.budget)])]
    rows.append(np.full(count, len(child)))
    columns.append(places)
    entries.append(problem.cost.astype(float))
    if purse.room is not None:
        rows.append(len(child) + 1 + problem.head)
        columns.append(places)
        entries.append(problem.cost.astype(float))
        limits.append(purse.room.cpu().numpy().astype(float))
    upper = np.concatenate(limits)
    matrix = coo_array(
        (np.concatenate(entries), (np.concatenate(rows), np.concatenate(columns))),
        shape=(len(upper), count),
    ).tocsc()
    solution = milp(
        -problem.gain / largest,
        integrality=np.ones(count),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, -np.inf, upper),
        options={"mip_rel_gap": 0.0},
    )
    if solution.x is None:
        raise GracekvError(f"The integer program was not solved: {solution.message}")
    return np.asarray(solution.x > 0.5)
