"""Dequantised numbers, and the widths that a budget buys, in loops and float64."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Literal

import torch
from torch import Tensor

from gracekv.cache.coded import Coding
from gracekv.precision.width_auction import Entries, WidthCosts

Side = Literal["keys", "values"]


def rounded(numbers: Tensor, lengths: Tensor, coding: Coding, side: Side) -> tuple[Tensor, Tensor]:
    """Dequantised `numbers` [E, d], and the steps between their codes; float64 [E, d].

    Rows hold `lengths` (int64 [rows]) entries. In a group of numbers x with distinct values, the
    zero point is the largest 16-bit number that is not above the least x, the step is the smallest
    with which 2^bits - 1 steps reach the largest x, and x becomes the nearest step's number. A
    group of equal numbers does not change; its step is 0. Source: `UniformPrecision`.
    """
    every = _every(torch.float16 if numbers.dtype == torch.float32 else numbers.dtype)
    x = numbers.double()
    read, steps = x.clone(), torch.zeros_like(x)
    levels = 2**coding.bits - 1
    for rows, columns in _groups(x, lengths, coding, side):
        group = x[rows, columns]
        if group.min() == group.max():
            continue
        zero = every[torch.searchsorted(every, group.min(), right=True) - 1]
        step = every[torch.searchsorted(every, (group.max() - zero) / levels)]
        read[rows, columns] = zero + step * ((group - zero) / step).round()
        steps[rows, columns] = step
    return read, steps


def allocated_widths(entries: Entries, costs: WidthCosts, budget: int) -> list[int]:
    """0 for an entry that is dropped, else 1 + the index of its width.

    Repeatedly buys the operation of largest gain per byte among those that fit. Source:
    `gracekv.precision.width_auction.allocated_widths`.
    """
    widths = len(costs.bits)
    offers = []
    for entry, worth in enumerate(entries.worth.tolist()):
        if entries.fixed[entry]:
            offers.append((-worth / costs.entry[-1], entry, 0, widths))
            continue
        slopes = _hull_slopes(entries.loss[int(entries.head[entry])].tolist(), costs)
        offers += [(-worth * slope, entry, step, step + 1) for step, slope in enumerate(slopes)]
    # A stable sort: ties go to the earlier entry, then to the smaller width.
    operations = [operation[1:] for operation in sorted(offers, key=lambda x: x[0])]
    level = [0] * len(entries.worth)
    heads = entries.head.tolist()
    while True:
        for entry, source, target in operations:
            bought = [*level[:entry], target, *level[entry + 1 :]]
            if level[entry] == source and _bytes(bought, heads, costs) <= budget:
                level = bought
                break
        else:
            return level


def widths_at_a_price(entries: Entries, costs: WidthCosts, budget: int) -> list[int]:
    """0 for an entry that is dropped, else 1 + the index of its width, each head within `budget`.

    The price of a bit falls; an entry goes to its next width when the loss saved per bit equals the
    price, the earlier entry first, until one does not fit. Source:
    `gracekv.precision.width_auction.widths_by_head`.
    """
    in_bits = WidthCosts(costs.bits, costs.bits, (0,) * len(costs.bits), 1)
    level = [0] * len(entries.worth)
    for head, loss in enumerate(entries.loss.tolist()):
        rows = [e for e, h in enumerate(entries.head.tolist()) if h == head]
        slopes = _hull_slopes(loss, in_bits)
        prices = [(float(entries.worth[e]) * x, e) for e in rows for x in slopes]
        for _, e in sorted(prices, key=lambda x: -x[0]):
            level[e] += 1
            if _bytes([level[x] for x in rows], [head] * len(rows), costs) > budget:
                level[e] -= 1
                break
    return level


def _hull_slopes(loss: list[float], costs: WidthCosts) -> list[float]:
    """Slopes of the upper hull of saved loss over bytes, for each step to the next width."""
    bytes_: list[float] = [0.0, *costs.mean().tolist()]
    losses = [1.0, *(min(max(share, 0.0), 1.0) for share in loss)]

    def chord(start: int, end: int) -> float:
        return (losses[start] - losses[end]) / max(bytes_[end] - bytes_[start], 1.0)

    slopes = []
    for step in range(len(loss)):
        ends = range(step + 1, len(losses))
        slope = min(max(chord(start, end) for end in ends) for start in range(step + 1))
        slopes.append(max(0.0, slope))
    return slopes


def _bytes(level: list[int], heads: list[int], costs: WidthCosts) -> int:
    """Bytes of entries at these levels."""
    total = 0
    for width, (entry, block) in enumerate(zip(costs.entry, costs.block, strict=True), start=1):
        counts = Counter(head for choice, head in zip(level, heads, strict=True) if choice == width)
        blocks = sum(-(-count // costs.per_block) for count in counts.values())
        total += entry * counts.total() + block * blocks
    return total


def _groups(
    x: Tensor, lengths: Tensor, coding: Coding, side: Side
) -> list[tuple[slice | int, slice | int]]:
    """The entries and channels of each group."""
    entries, dim = x.shape
    if side == "values":
        size = min(coding.group, dim)
        return [(e, slice(c, c + size)) for e in range(entries) for c in range(0, dim, size)]
    blocks: list[tuple[slice | int, slice | int]] = []
    begin = 0
    for length in lengths.tolist():
        for first in range(begin, begin + length, coding.group):
            last = min(first + coding.group, begin + length)
            blocks += [(slice(first, last), c) for c in range(dim)]
        begin += length
    return blocks


@functools.cache
def _every(kind: torch.dtype) -> Tensor:
    """float64, all finite numbers of a 16-bit dtype, ascending."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(kind).double()
    return numbers[numbers.isfinite()].sort().values
