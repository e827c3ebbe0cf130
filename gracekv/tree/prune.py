"""Finds nodes that the greedy auction cannot reach, before they are refined.

The key of an operation is the least unit utility of itself and its ancestors. The auction buys by
descending key until the budget is spent, at some threshold. If only some trees are known, the
threshold of the known operations is a lower bound on the final one: more operations can only raise
it. A node whose own operation has a smaller key is never split and need not be refined. Source:
departures 8.

Two details keep this exact. The floor buys paths to its candidates regardless of their keys; such
nodes count as free when deciding what can be reached, and with their real key when bounding the
threshold. And the budget left at the threshold, less than one operation's cost, may buy operations
of lower keys; with costs of at most 2 that is one entry for one operation, a child of a bought one,
which is known.

A lower bound is weak while few operations are known. So the first group of trees provides a guess:
its own threshold, for slightly more than its share of the budget, is used for all groups. In the
end, the known operations above the guess must exceed the budget, which proves that the guess is a
lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# How much more than its share the first group may spend. Groups differ by a few percent on real
# captures; if the guess is too high, everything is grown again; if too low, a few more nodes are.
_SLACK = 1.12


class Pruner:
    """The key below which nodes are not refined, kept on the device of the trees.

    Args:
        budget: entries that floor and auction may spend together (B_base), or None for no pruning.
        lower_bound: a known lower bound on the threshold, float64 []; or None for a guess by the
            first group of trees.
    """

    def __init__(self, budget: int | None = None, lower_bound: Tensor | None = None) -> None:
        self.threshold: Tensor | float = 0.0 if lower_bound is None else lower_bound
        self._budget, self._limit = budget, float(budget or 0)
        self._may_guess = lower_bound is None and budget is not None
        self._guess: Tensor | float | None = None
        # The known operations of largest key; each costs at least one entry, so the budget cannot
        # pay for others. `_unsorted` counts those not yet sorted.
        self._keys, self._costs, self._unsorted = list[Tensor](), list[Tensor](), 0

    @contextmanager
    def group(self, share: float) -> Iterator[None]:
        """Context in which a group of trees, `share` of all, grows."""
        guesses = self._may_guess and share < 1
        if guesses:
            self._limit *= min(_SLACK * share, 1.0)
        yield
        if guesses:
            self._may_guess, self._limit = False, float(self._budget or 0)
            self._guess = self.threshold

    def reaches(self, keys: Tensor) -> Tensor:
        """Which operations the auction may reach, bool [n], from their keys float64 [n]."""
        limit = self.threshold
        return keys >= (limit if isinstance(limit, float) else limit.to(keys.device))

    def add(self, keys: Tensor, costs: Tensor) -> None:
        """Add operations: keys float64 [n], whose ancestors were added, and costs int64 [n].

        The threshold is raised only after enough operations, because that needs a sort.
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
        """A proven lower bound on the auction's threshold, float64 []."""
        return self._reached(float(self._budget or 0))

    def is_exact(self) -> bool:
        """Whether the auction provably cannot reach any node that was not refined."""
        return self._guess is None or bool(self.lower_bound() >= self._guess)

    def _reached(self, budget: float) -> Tensor:
        """The largest key at or above which known operations cost more than `budget`, or 0."""
        keys, order = torch.cat(self._keys).sort(descending=True)
        costs, most = torch.cat(self._costs)[order], (self._budget or 0) + 1
        self._keys, self._costs, self._unsorted = [keys[:most]], [costs[:most]], 0
        return torch.where(costs.cumsum(0) > budget, keys, 0.0).max()
