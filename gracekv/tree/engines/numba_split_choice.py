"""The split of a node with known costs, compiled: `gracekv.tree.refine` for one node.

In float64 and in the same order, without contraction, so that the choice is the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

_TINY = np.finfo(np.float64).tiny


@njit(nogil=True)  # type: ignore[untyped-decorator]
def mark_cuts(kappa: Any, first: int, n: int, cuts: int, chosen: Any, top: Any) -> None:
    """Mark the cut candidates: the midpoint, and the `cuts` tokens of highest kappa.

    Args:
        kappa: float64, token k's at first + k; ties: the earlier.
        first, n: the node's tokens; n >= 2.
        cuts: number of candidates besides the midpoint.
        chosen: bool [n or more], filled.
        top: int64 [cuts or more], scratch.
    """
    if cuts >= n - 1:
        chosen[0] = False
        chosen[1:n] = True
        return
    chosen[:n] = False
    chosen[n // 2] = True
    if cuts == 0:
        return
    count = 0
    for k in range(1, n):
        x = kappa[first + k]
        if count == cuts and not x > kappa[first + top[count - 1]]:
            continue
        # Insert among the highest so far, after equal ones.
        place = count if count < cuts else cuts - 1
        while place > 0 and x > kappa[first + top[place - 1]]:
            top[place] = top[place - 1]
            place -= 1
        top[place] = k
        count = min(count + 1, cuts)
    for i in range(count):
        chosen[top[i]] = True


@njit(nogil=True)  # type: ignore[untyped-decorator]
def best_cut(
    node_cost: float, costs: Any, n: int, chosen: Any, kappa: Any, first: int, reward: float
) -> tuple[int, float]:
    """Where to cut, and the gain: argmax of D - D(left) - D(right) + reward kappa-hat.

    Args:
        node_cost: D of the node.
        costs: float32 [2, n]: D of prefixes up to k and suffixes from k.
        n, chosen, kappa, first: as in `mark_cuts`.
        reward: lambda_kappa; with 0, kappa is not read.
    """
    low, span = 0.0, 0.0
    if reward != 0.0:
        low = high = kappa[first]
        for k in range(1, n):
            low, high = min(low, kappa[first + k]), max(high, kappa[first + k])
        span = high - low
    at, top = 0, -np.inf
    for k in range(1, n):
        if not chosen[k]:
            continue
        gain = node_cost - np.float64(costs[0, k - 1]) - np.float64(costs[1, k])
        if span > 0.0:
            gain += reward * ((kappa[first + k] - low) / max(span, _TINY))
        if at == 0 or gain > top:
            at, top = k, gain
    return at, top


@njit(nogil=True)  # type: ignore[untyped-decorator]
def argmax(x: Any, first: int, n: int) -> int:
    """k of the largest of x[first : first + n]; ties: the earliest."""
    at = 0
    for k in range(1, n):
        if x[first + k] > x[first + at]:
            at = k
    return at


@njit(nogil=True)  # type: ignore[untyped-decorator]
def extraction_utility(node_cost: float, costs: Any, n: int, at: int) -> float:
    """Gain per added entry of extracting token `at` of a node of n >= 2 tokens."""
    before, after, added = 0.0, 0.0, 0
    if at > 0:
        before, added = np.float64(costs[0, at - 1]), added + 1
    if at + 1 < n:
        after, added = np.float64(costs[1, at + 1]), added + 1
    return (node_cost - before - after) / added
