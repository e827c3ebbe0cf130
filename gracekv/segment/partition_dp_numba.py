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
        count = min(max_length, length - start) - min_length + 1
        if best[start] == -np.inf or count <= 0:
            continue
        # Slices: with indices into the whole arrays the compiler does not vectorise the loop.
        total, first = best[start], start + min_length
        row = profit[start, min_length - 1 : min_length - 1 + count]
        ends, predecessors = best[first : first + count], previous[first : first + count]
        for k in range(count):
            candidate = total + row[k]
            better = candidate > ends[k]
            ends[k] = candidate if better else ends[k]
            predecessors[k] = start if better else predecessors[k]
    if best[length] == -np.inf:
        for start in range(max(0, length - max_length), length):
            candidate = best[start] + profit[start, length - start - 1]
            if candidate > best[length]:
                best[length], previous[length] = candidate, start
