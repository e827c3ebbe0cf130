"""Which nodes the greedy auction cannot reach, known before they are refined.

Let key(a) be the least unit utility over an operation and its ancestors. The auction buys in
descending key until the budget ends, at a cut. With only part of all trees known, the cut of the
known operations is a lower bound of the final one: more operations can only push it up. A node
whose own operation has a smaller key is therefore never split, and need not be refined. Source:
departures 8.

Two things keep this exact. The floor buys paths to its candidates whatever their keys; such nodes
count as free when it is asked what can be reached, and at their real key when the cut is bounded.
And what is left behind the cut, less than one operation's cost, may go to lower keys; with costs
of at most 2 that is one entry for one operation, which hangs below what was bought and is known.

A lower bound is weak while little is known. So the first part of the trees guesses: its own cut,
for somewhat more than its share of the budget, is taken for everybody's, and in the end it is
checked that what is known above the guess exceeds the budget, which makes the guess a lower bound
after all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# How much more than its share the first part may spend. Parts differ by a few percent on real
# captures; a guess that is too high costs growing everything again, one too low a few nodes more.
_SLACK = 1.12


class Pruner:
    """What is too poor to be refined.

    Args:
        budget: entries that floor and auction may spend together (B_base); None: nothing is.
        least: a lower bound of the cut that is known already; None: let the first part guess.
    """

    def __init__(self, budget: int | None = None, least: float | None = None) -> None:
        self.cut = least or 0.0
        self._budget = math.inf if budget is None else float(budget)
        self._limit = self._budget
        self._samples = least is None and budget is not None
        self._guess = 0.0
        self._known = _Known()

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """While the part of the trees that is `share` of all grows."""
        first = self._samples and share < 1
        if first:
            self._limit = min(_SLACK * share, 1.0) * self._budget
        yield
        if first:
            self._samples, self._limit = False, self._budget
            self._guess = self.cut

    def see(self, keys: Tensor, costs: Tensor) -> None:
        """Operations become known: keys float64 [n] with all ancestors seen, costs int64 [n].

        The cut is raised once enough came that a sort pays.
        """
        if self._budget == math.inf:
            return
        relevant = keys > self.cut
        self._known.add(keys[relevant].cpu(), costs[relevant].cpu())
        if 4 * self._known.fresh > self._limit:
            self.cut = max(self.cut, self._known.cut(self._limit))

    def bound(self) -> float:
        """A lower bound of the auction's cut for certain: of what is known, guess or not."""
        return self._known.cut(self._budget)

    def holds(self) -> bool:
        """Whether everything that was left out is out of reach for certain."""
        return self._guess == 0.0 or self.bound() >= self._guess


class _Known:
    """The known operations of largest key, as many as a budget can pay for."""

    def __init__(self) -> None:
        self.fresh = 0
        self._keys: list[Tensor] = []
        self._costs: list[Tensor] = []

    def add(self, keys: Tensor, costs: Tensor) -> None:
        self._keys.append(keys)
        self._costs.append(costs)
        self.fresh += int(costs.sum())

    def cut(self, budget: float) -> float:
        """The largest key down to which they cost more than `budget`; 0 if they never do."""
        self.fresh = 0
        keys, costs = torch.cat(self._keys), torch.cat(self._costs)
        keys, order = keys.sort(descending=True)
        costs = costs[order]
        over = int(torch.searchsorted(costs.cumsum(0).double(), budget, right=True))
        cut = 0.0
        if over < len(keys):
            cut = float(keys[over])
            # Ties at the cut stay.
            kept = int((keys >= cut).sum())
            keys, costs = keys[:kept], costs[:kept]
        self._keys, self._costs = [keys], [costs]
        return cut
