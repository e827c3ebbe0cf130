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
"""

from __future__ import annotations

import torch
from torch import Tensor


class Pruner:
    """A growing lower bound of the auction's cut.

    Args:
        budget: entries that floor and auction may spend together (B_base).
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._keys: list[Tensor] = []
        self._costs: list[Tensor] = []
        self._fresh = 0
        self.cut = 0.0

    def see(self, keys: Tensor, costs: Tensor) -> None:
        """Operations become known: keys float64 [n] with all ancestors seen, costs int64 [n].

        The cut is raised once enough came that a sort pays.
        """
        relevant = keys > self.cut
        self._keys.append(keys[relevant].cpu())
        self._costs.append(costs[relevant].cpu())
        self._fresh += int(self._costs[-1].sum())
        if 4 * self._fresh > self._budget:
            self._raise_cut()

    def _raise_cut(self) -> None:
        """Bound the cut by everything seen: the largest key down to which it exceeds the budget."""
        self._fresh = 0
        keys, costs = torch.cat(self._keys), torch.cat(self._costs)
        keys, order = keys.sort(descending=True)
        spent = costs[order].cumsum(0)
        over = int(torch.searchsorted(spent, self._budget, right=True))
        if over < len(keys):
            self.cut = float(keys[over])
            kept = keys >= self.cut
            keys, order = keys[kept], order[kept]
        self._keys, self._costs = [keys], [costs[order]]
