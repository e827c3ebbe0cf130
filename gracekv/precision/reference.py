"""What quantised numbers are read as, one group at a time in float64."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gracekv.cache.coded import Coding, Grouping


def rounded(
    numbers: Tensor, lengths: Tensor, coding: Coding, by: Grouping
) -> tuple[Tensor, Tensor]:
    """float64 [E, d]: what `numbers` [E, d] are read as after quantising, and their steps.

    Rows hold `lengths` (int64 [rows]) entries. In a group of numbers x with distinct values, the
    zero point is the largest 16-bit number that is not above the least x, the step the smallest
    one by which 2^bits - 1 steps reach the largest x, and x is read as the nearest step's number.
    A group of equal numbers is read as they are, its step is 0. Source: `UniformPrecision`.
    """
    kind = torch.float16 if numbers.dtype == torch.float32 else numbers.dtype
    every = _every(kind)
    x = numbers.double()
    read, steps = x.clone(), torch.zeros_like(x)
    levels = 2**coding.bits - 1
    for rows, columns in _groups(x, lengths, coding, by):
        group = x[rows, columns]
        if group.min() == group.max():
            continue
        zero = every[torch.searchsorted(every, group.min(), right=True) - 1]
        step = every[torch.searchsorted(every, (group.max() - zero) / levels)]
        codes = ((group - zero) / step).round()
        read[rows, columns] = zero + step * codes
        steps[rows, columns] = step
    return read, steps


def _groups(
    x: Tensor, lengths: Tensor, coding: Coding, by: Grouping
) -> list[tuple[slice | int, slice | int]]:
    """The entries and channels of each group."""
    entries, dim = x.shape
    if by == "token":
        size = min(coding.group, dim)
        return [(e, slice(c, c + size)) for e in range(entries) for c in range(0, dim, size)]
    found: list[tuple[slice | int, slice | int]] = []
    begin = 0
    for length in lengths.tolist():
        for first in range(begin, begin + length, coding.group):
            last = min(first + coding.group, begin + length)
            found += [(slice(first, last), c) for c in range(dim)]
        begin += length
    return found


@functools.cache
def _every(kind: torch.dtype) -> Tensor:
    """float64, all finite numbers of a 16-bit dtype, ascending."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(kind).double()
    return numbers[numbers.isfinite()].sort().values
