"""How a judged node is split, compiled: `gracekv.tree.binary` and `gracekv.tree.extract`.

In float64 and in the order of those files, nothing contracted, so that the choice is the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

_TINY = np.finfo(np.float64).tiny


@njit(nogil=True)  # type: ignore[untyped-decorator]
def candidates(kappa: Any, first: int, n: int, most: int, chosen: Any, best: Any) -> None:
    """Mark chosen [n] where a cut is considered: before the middle, and before the `most` tokens of
    highest kappa.

    Args:
        kappa: float64, token k's at first + k; ties: the earlier.
        first, n: the node's tokens; n >= 2.
        most: how many.
        chosen: bool [n or more].
        best: int64 [most or more] to work in.
    """
    if most >= n - 1:
        chosen[0] = False
        chosen[1:n] = True
        return
    chosen[:n] = False
    chosen[n // 2] = True
    if most == 0:
        return
    count = 0
    for k in range(1, n):
        x = kappa[first + k]
        if count == most and not x > kappa[first + best[count - 1]]:
            continue
        # Insert among the best so far, behind its equals.
        place = count if count < most else most - 1
        while place > 0 and x > kappa[first + best[place - 1]]:
            best[place] = best[place - 1]
            place -= 1
        best[place] = k
        count = min(count + 1, most)
    for i in range(count):
        chosen[best[i]] = True


@njit(nogil=True)  # type: ignore[untyped-decorator]
def best_cut(
    whole: float, found: Any, n: int, chosen: Any, kappa: Any, first: int, reward: float
) -> tuple[int, float]:
    """Where to cut, and the gain: argmax of D - D(left) - D(right) + reward kappa-hat.

    Args:
        whole: D of the node.
        found: float32 [2, n]: D of prefixes up to k and suffixes from k.
        n, chosen, kappa, first: as in `candidates`.
        reward: lambda_kappa; 0: kappa is not read.
    """
    low, span = 0.0, 0.0
    if reward != 0.0:
        low = high = kappa[first]
        for k in range(1, n):
            low, high = min(low, kappa[first + k]), max(high, kappa[first + k])
        span = high - low
    at, best = 0, -np.inf
    for k in range(1, n):
        if not chosen[k]:
            continue
        gain = whole - np.float64(found[0, k - 1]) - np.float64(found[1, k])
        if span > 0.0:
            gain += reward * ((kappa[first + k] - low) / max(span, _TINY))
        if at == 0 or gain > best:
            at, best = k, gain
    return at, best


@njit(nogil=True)  # type: ignore[untyped-decorator]
def highest(x: Any, first: int, n: int) -> int:
    """k of the largest of x[first : first + n]; ties: the earliest."""
    at = 0
    for k in range(1, n):
        if x[first + k] > x[first + at]:
            at = k
    return at


@njit(nogil=True)  # type: ignore[untyped-decorator]
def lifting(whole: float, found: Any, n: int, at: int) -> float:
    """Gain per added entry of lifting token `at` out of a node of n >= 2 tokens."""
    before, after, sides = 0.0, 0.0, 0
    if at > 0:
        before, sides = np.float64(found[0, at - 1]), sides + 1
    if at + 1 < n:
        after, sides = np.float64(found[1, at + 1]), sides + 1
    return (whole - before - after) / sides
