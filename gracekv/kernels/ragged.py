"""Rows of different lengths in one flat array: starts of rows, and each item's row.

Counts 2 0 3 have offsets 0 2 2 5, rows 0 0 2 2 2 and steps 0 1 0 1 2.

Source: ours.
"""

from __future__ import annotations

import torch
from torch import Tensor


def offsets(counts: Tensor) -> Tensor:
    """int64 [n + 1]: row i is [offsets[i], offsets[i + 1]); `counts` are int64 [n], at least 0."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def blocks(counts: Tensor, size: int | Tensor) -> Tensor:
    """int64, same shape as `counts` [any shape]: number of blocks of up to `size` items."""
    return (counts + size - 1) // size


def rows(counts: Tensor, total: int | None = None) -> Tensor:
    """int64 [sum(counts)]: the row of each item; `counts` are int64 [n], at least 0.

    Passing `total`, their sum, avoids synchronising with a GPU.
    """
    every = torch.arange(len(counts), device=counts.device)
    return torch.repeat_interleave(every, counts, output_size=total)


def rows_and_steps(counts: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """The row of each item and its index in that row, both int64 [sum(counts)]; see `rows`."""
    row = rows(counts, total)
    return row, torch.arange(len(row), device=counts.device) - (counts.cumsum(0) - counts)[row]
