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


def dense_rank(values: Tensor, *, falling: bool = False) -> Tensor:
    """int64 [n]: how many distinct values lie below each (above it, if `falling`)."""
    order = descending(values if falling else -values)
    ordered = values.index_select(0, order)
    steps = torch.zeros_like(order)
    steps[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    return torch.empty_like(order).index_copy_(0, order, steps)
