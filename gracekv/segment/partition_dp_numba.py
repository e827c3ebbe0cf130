"""The best ordered partition in one compiled pass over the candidate slots, for CPUs.

Needs numba (`pip install "gracekv[cpu]"`); importing this module compiles nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]
from numpy.typing import NDArray


def best_partition(
    profit: NDArray[np.float64], min_length: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """F [N+1] and the best predecessor, int64 [N+1], of each endpoint; see `partition_dp`."""
    length = len(profit)
    best = np.full(length + 1, -np.inf)
    best[0] = 0.0
    previous = np.zeros(length + 1, np.int64)
    _extend(profit, min_length, best, previous)
    return best, previous


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _extend(profit: Any, min_length: int, best: Any, previous: Any) -> None:
    """Extend each start, in ascending order, by all its slots: ties keep the earlier start."""
    length, max_length = profit.shape
    for start in range(length):
        total = best[start]
        longest = min(max_length, length - start)
        if total == -np.inf:
            continue
        for n in range(min_length, longest + 1):
            candidate = total + profit[start, n - 1]
            better = candidate > best[start + n]
            best[start + n] = candidate if better else best[start + n]
            previous[start + n] = start if better else previous[start + n]
    if best[length] == -np.inf:
        for start in range(max(0, length - max_length), length):
            candidate = best[start] + profit[start, length - start - 1]
            if candidate > best[length]:
                best[length], previous[length] = candidate, start
