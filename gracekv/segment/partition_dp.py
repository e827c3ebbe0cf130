"""The best ordered partition under length limits, given the profit of each candidate slot."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def best_partition(profit: Tensor, min_length: int) -> tuple[Tensor, Tensor]:
    """Cut [0, N) into slots of greatest total profit.

    Computed on the CPU: of the few operations for each block of endpoints none keeps a GPU busy, so
    copying the profits there once is faster.

    Args:
        profit: [N, n_max] float64; entry (a, n-1) is the profit of the slot of n tokens from a on.
            Entries whose slot ends beyond N are never read.
        min_length: n_min <= n_max, the shortest slot. Only the last slot may be shorter, and only
            if no slot within the limits reaches N.

    Returns:
        On the CPU, F [N+1], the best total up to each endpoint (-inf where none is reachable), and
        the bounds int64 [J+1], 0 and N included. Among equal totals the earliest predecessor wins.

    Source: Eq. (S12).
    """
    best, previous = _best_predecessors(profit.cpu(), min_length)
    bounds, predecessors = [len(profit)], previous.tolist()
    while bounds[-1] > 0:
        bounds.append(predecessors[bounds[-1]])
    return best, torch.tensor(bounds[::-1])


def _best_predecessors(profit: Tensor, min_length: int) -> tuple[Tensor, Tensor]:
    """F [N+1] and the best predecessor, int64 [N+1], of each endpoint."""
    length, max_length = profit.shape
    device, choices = profit.device, max_length - min_length + 1
    # Endpoint i and column c belong to the predecessor i - max_length + c, so earlier predecessors
    # come first and max keeps the earliest. Along a row of `slots` the start advances and the slot
    # shrinks: one row down, one column left, hence the skewed view.
    rows = functional.pad(profit[:, min_length - 1 :], (0, 0, max_length, 0), value=-torch.inf)
    slots = rows.as_strided(
        (length + 1, choices), (choices, choices - 1), storage_offset=choices - 1
    )
    padded = torch.full((max_length + length + 1,), -torch.inf, dtype=profit.dtype, device=device)
    best, before = padded[max_length:], padded.unfold(0, choices, 1)
    best[0] = 0.0
    choice = torch.zeros(length + 1, dtype=torch.int64, device=device)
    # No slot is shorter than min_length, so that many endpoints do not depend on one another.
    for start in range(min_length, length + 1, min_length):
        ends = slice(start, min(start + min_length, length + 1))
        torch.max(before[ends] + slots[ends], dim=1, out=(best[ends], choice[ends]))
    previous = torch.arange(length + 1, device=device) - max_length + choice
    if length and -(-length // max_length) * min_length > length:
        # No slot within the limits reaches the end: the last one may be shorter.
        starts = torch.arange(max(0, length - max_length), length, device=device)
        totals = best[starts] + profit[starts, length - starts - 1]
        torch.max(totals, dim=0, out=(best[length], choice[length]))
        previous[length] = starts[0] + choice[length]
    return best, previous
