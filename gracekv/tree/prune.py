"""Find nodes that the greedy auction cannot reach, before they are refined.

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

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# How much more than its share the first group may spend. Groups differ by a few percent on real
# captures; a guess that is too high costs growing everything again, one too low a few nodes more.
_SLACK = 1.12


class Pruner:
    """The key below which nodes are not refined; it stays on the device of the trees.

    Args:
        budget: entries that floor and auction may spend together (B_base), or None not to prune.
        lower_bound: a known lower bound of the threshold, float64 []; or None: the first group
            of trees guesses one.
    """

    def __init__(self, budget: int | None = None, lower_bound: Tensor | None = None) -> None:
        self.threshold: Tensor | float = 0.0 if lower_bound is None else lower_bound
        self._budget, self._limit = budget, float(budget or 0)
        self._may_guess = lower_bound is None and budget is not None
        self._guess: Tensor | float | None = None
        # The known operations of largest key: each costs an entry or more, so that the budget
        # cannot pay for others. Not yet sorted: those of `_unsorted`.
        self._keys, self._costs, self._unsorted = list[Tensor](), list[Tensor](), 0

    @contextmanager
    def group(self, share: float) -> Iterator[None]:
        """Context in which a group of trees grows, `share` of all trees."""
        guesses = self._may_guess and share < 1
        if guesses:
            self._limit *= min(_SLACK * share, 1.0)
        yield
        if guesses:
            self._may_guess, self._limit = False, float(self._budget or 0)
            self._guess = self.threshold

    def reaches(self, keys: Tensor) -> Tensor:
        """Which operations the auction may reach, bool [n] by their keys float64 [n]."""
        limit = self.threshold
        return keys >= (limit if isinstance(limit, float) else limit.to(keys.device))

    def add(self, keys: Tensor, costs: Tensor) -> None:
        """Add operations: keys float64 [n], whose ancestors were added, and costs int64 [n].

        The threshold is raised only after enough operations, because that sorts.
        """
        if self._budget is None:
            return
        device = self._keys[0].device if self._keys else keys.device
        self._keys.append(keys.to(device))
        self._costs.append(costs.to(device))
        self._unsorted += len(keys)
        if 4 * self._unsorted > self._limit:
            self.threshold = self._reached(self._limit).clamp(min=self.threshold)

    def lower_bound(self) -> Tensor:
        """A proven lower bound of the auction's threshold, float64 []."""
        return self._reached(float(self._budget or 0))

    def is_exact(self) -> bool:
        """Whether the auction certainly cannot reach any node that was not refined."""
        return self._guess is None or bool(self.lower_bound() >= self._guess)

    def _reached(self, budget: float) -> Tensor:
        """The largest key down to which the known operations cost more than `budget`, or 0."""
        keys, order = torch.cat(self._keys).sort(descending=True)
        costs, most = torch.cat(self._costs)[order], (self._budget or 0) + 1
        self._keys, self._costs, self._unsorted = [keys[:most]], [costs[:most]], 0
        return torch.where(costs.cumsum(0) > budget, keys, 0.0).max()
