"""Which nodes the greedy auction cannot reach, known before they are refined.

The key of an operation is the least unit utility over itself and its ancestors. The auction buys in
descending key until the budget is spent, at some threshold. With only part of all trees known, the
threshold of the known operations is a lower bound of the final one: more operations can only raise
it. A node whose own operation has a smaller key is never split, and need not be refined. Source:
departures 8.

Two things keep this exact. The floor buys paths to its candidates whatever their keys; such nodes
count as free when it is decided what can be reached, and at their real key when the threshold is
bounded. And the budget left at the threshold, less than one operation's cost, may buy operations of
lower keys; with costs of at most 2 that is one entry for one operation, which is a child of what
was bought and is known.

A lower bound is weak while few operations are known. So the first group of trees guesses: its own
threshold, for somewhat more than its share of the budget, is used for all groups. In the end the
operations known above the guess must exceed the budget, which makes the guess a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# How much more than its share the first group may spend. Groups differ by a few percent on real
# captures; a guess that is too high costs growing everything again, one too low a few nodes more.
_SLACK = 1.12


class Pruner:
    """The key below which nodes are not refined.

    Args:
        budget: entries that floor and auction may spend together (B_base); None: no pruning.
        lower_bound: of the threshold, if known; None: the first group of trees guesses one.
    """

    def __init__(self, budget: int | None = None, lower_bound: float | None = None) -> None:
        self.threshold = lower_bound or 0.0
        self._budget = self._limit = math.inf if budget is None else float(budget)
        self._may_guess = lower_bound is None and budget is not None
        self._guess = 0.0
        # The known operations of largest key, as many as the budget can pay for.
        self._keys, self._costs, self._unsorted_cost = list[Tensor](), list[Tensor](), 0

    @contextmanager
    def group(self, share: float) -> Iterator[None]:
        """Context in which a group of trees grows, `share` of all trees."""
        guesses = self._may_guess and share < 1
        if guesses:
            self._limit = min(_SLACK * share, 1.0) * self._budget
        yield
        if guesses:
            self._may_guess, self._limit = False, self._budget
            self._guess = self.threshold

    def add(self, keys: Tensor, costs: Tensor) -> None:
        """Add operations: keys float64 [n], whose ancestors were added, and costs int64 [n].

        The threshold is raised only after enough operations, because that sorts.
        """
        if self._budget == math.inf:
            return
        above = keys > self.threshold
        self._keys.append(keys[above].cpu())
        self._costs.append(costs[above].cpu())
        self._unsorted_cost += int(self._costs[-1].sum())
        if 4 * self._unsorted_cost > self._limit:
            self.threshold = max(self.threshold, self._reached(self._limit))

    def lower_bound(self) -> float:
        """A proven lower bound of the auction's threshold."""
        return self._reached(self._budget)

    def is_exact(self) -> bool:
        """Whether the auction certainly cannot reach any node that was not refined."""
        return self._guess == 0.0 or self.lower_bound() >= self._guess

    def _reached(self, budget: float) -> float:
        """The largest key down to which the known operations cost more than `budget`; 0: never."""
        self._unsorted_cost = 0
        keys, costs = torch.cat(self._keys), torch.cat(self._costs)
        keys, order = keys.sort(descending=True)
        costs = costs[order]
        first = int(torch.searchsorted(costs.cumsum(0).double(), budget, right=True))
        threshold = 0.0
        if first < len(keys):
            threshold = float(keys[first])
            # Ties at the threshold stay.
            kept = int((keys >= threshold).sum())
            keys, costs = keys[:kept], costs[:kept]
        self._keys, self._costs = [keys], [costs]
        return threshold
