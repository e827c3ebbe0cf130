"""Scores that express an order of tokens and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_scores(order: Tensor) -> Tensor:
    """Scores N, N - 1, ..., 1 over their sum, for the tokens in this order; float32 as `order`.

    Args:
        order: int64 [..., N], token indices from first to last.

    Source: ours.
    """
    length = order.shape[-1]
    ranks = torch.arange(length, 0, -1, dtype=torch.float64, device=order.device)
    ranks = (ranks / ranks.sum()).float().expand_as(order)
    return torch.zeros_like(ranks).scatter_(-1, order, ranks)
