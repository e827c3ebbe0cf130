"""The best ordered partition under length limits, given what each candidate slot is worth."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray


def best_partition(
    profit: NDArray[np.float64], min_length: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Cut [0, N) into slots of greatest total profit.

    Args:
        profit: [N, n_max]; entry (a, n-1) is what the slot of n tokens from a on is worth. Entries
            whose slot ends beyond N are never read.
        min_length: n_min <= n_max, the shortest slot. Only the last slot may be shorter, and only
            if no slot within the limits reaches N.

    Returns:
        F [N+1], the best total up to each endpoint (-inf where none is reachable), and the bounds
        [J+1], 0 and N included. Among equal totals the earliest predecessor wins.

    Source: Eq. (S12).
    """
    length, max_length = profit.shape
    choices = max_length - min_length + 1
    # Endpoint i and column c stand for the predecessor i - max_length + c, so earlier predecessors
    # come first and argmax keeps the earliest. Along a row of `slots` the start advances and the
    # slot shrinks: one row down, one column left, hence the skewed view.
    rows = np.full((max_length + length, choices), -np.inf)
    rows[max_length:] = profit[:, min_length - 1 :]
    down, right = rows.strides
    slots = as_strided(
        rows[:, choices - 1 :], (length + 1, choices), (down, down - right), writeable=False
    )
    padded = np.full(max_length + length + 1, -np.inf)
    best, previous = padded[max_length:], np.zeros(length + 1, dtype=np.int64)
    best[0] = 0.0
    before = sliding_window_view(padded, choices)
    # No slot is shorter than min_length, so that many endpoints do not depend on one another.
    for start in range(min_length, length + 1, min_length):
        stop = min(start + min_length, length + 1)
        totals = before[start:stop] + slots[start:stop]
        choice = totals.argmax(axis=1)
        best[start:stop] = totals[np.arange(stop - start), choice]
        previous[start:stop] = np.arange(start, stop) - max_length + choice
    if best[length] == -np.inf and length:
        first = max(0, length - max_length)
        starts = np.arange(first, length)
        totals = best[starts] + profit[starts, length - starts - 1]
        choice = totals.argmax()
        best[length], previous[length] = totals[choice], starts[choice]
    bounds = [length]
    while bounds[-1] > 0:
        bounds.append(int(previous[bounds[-1]]))
    return best, np.array(bounds[::-1], dtype=np.int64)
