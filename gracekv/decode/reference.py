"""A cut in float64, entry by entry: attention, scores and the auction, in loops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gracekv.decode.base import HeldLayer


def attention(held: HeldLayer) -> Tensor:
    """float64 [G, N]: mean attention that each entry gets from the moved queries."""
    heads, group, count, _ = held.moved.shape
    received = torch.zeros(held.positions.shape, dtype=torch.float64)
    for g in range(heads):
        for n in range(group):
            for q in range(count):
                weights = []
                for key, log_m in zip(held.keys[g], held.log_multiplicity[g].tolist(), strict=True):
                    logit = float(held.moved[g, n, q].double() @ key.double())
                    if held.softcap is not None:
                        logit = held.softcap * math.tanh(logit / held.softcap)
                    weights.append(math.exp(logit + log_m))
                sink = 0.0
                if held.sink_logits is not None:
                    sink = math.exp(float(held.sink_logits[g * group + n]))
                total = sum(weights) + sink
                received[g] += torch.tensor(weights).double() / total / (group * count)
    return received


def kept(
    scores: list[Tensor], stays: list[Tensor], used: list[Tensor], budget: int, *, per_head: bool
) -> list[Tensor]:
    """bool [G, N] by layer: the entries that stay, from one sorted list or one per head.

    Args:
        scores: [G, N] by layer.
        stays: bool [G, N] by layer, entries that always stay.
        used: bool [G, N] by layer, where there is an entry.
        budget: most entries in all layers and heads.
        per_head: whether all heads have equal shares, up to one entry more in the first heads.
    """
    result = [torch.zeros_like(own) for own in used]
    units = [(layer, g) for layer, own in enumerate(scores) for g in range(len(own))]
    share, left = divmod(budget, len(units))
    room = {unit: share + (n < left) for n, unit in enumerate(units)}
    every = [
        (-math.inf if stays[layer][g, place] else -float(scores[layer][g, place]), layer, g, place)
        for layer, g in units
        for place in range(scores[layer].shape[1])
        if used[layer][g, place]
    ]
    for _, layer, g, place in sorted(every):
        if budget and (room[layer, g] or not per_head):
            result[layer][g, place] = True
            budget, room[layer, g] = budget - 1, room[layer, g] - 1
    return result
