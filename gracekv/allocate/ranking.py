"""Sorting and searching masks at the speed of the device (numpy is faster than torch on CPUs)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def descending(values: Tensor) -> Tensor:
    """int64 [n]: indices that sort `values` in descending order; ties in no particular order."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.argsort(-values.numpy()))
    return torch.sort(values, descending=True).indices


def where_true(mask: Tensor) -> Tensor:
    """int64: indices at which the bool [n] `mask` is true, ascending."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().flatten()


def largest(values: Tensor, count: int) -> Tensor:
    """bool [...], as `values` [...]: the `count` largest of all; ties go to the earlier.

    `count` is from 0 to the number of values. Linear in time; holds one copy of the values.
    """
    flat = values.flatten()
    if count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    cut = kth_largest(flat, count)
    kept = flat > cut
    tied = where_true(flat == cut)
    kept[tied[: count - int(torch.count_nonzero(kept))]] = True
    return kept.view_as(values)


def kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest of `values` [n], k from 1 to n, as a tensor without dimensions."""
    place = len(values) - k
    if values.device.type == "cpu":
        return torch.from_numpy(np.partition(values.numpy(), place)[place : place + 1])[0]
    return torch.kthvalue(values, place + 1).values


def dense_rank(values: Tensor, *, falling: bool = False) -> Tensor:
    """int64 [n]: how many distinct values lie below each (above it, if `falling`)."""
    order = descending(values if falling else -values)
    ordered = values.index_select(0, order)
    steps = torch.zeros_like(order)
    steps[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    return torch.empty_like(order).index_copy_(0, order, steps)
