"""Softcaps and sinks of attention logits, and `Columns`, what asks for their sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Replace scaled products x [..., T] by c tanh(x / c) in place, if there is a softcap c."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis, in place.

    Args:
        logits: [..., T], capped already.
        sinks: [..., 1] sink logits, which take a share of the softmax, or None.
    """
    if sinks is None:
        return torch.softmax(logits, dim=-1, out=logits)
    total = torch.logaddexp(logits.logsumexp(dim=-1, keepdim=True), sinks.to(logits))
    return logits.sub_(total).exp_()


class Columns(NamedTuple):
    """The arguments of `softmax_sums.softmax_columns`, on the keys' device.

    Attributes:
        queries: [H, Q, d].
        keys: [G, T, d].
        seen: int64 [Q].
        weights: float32 [Q].
        scale: factor of the logits.
        power: exponent of the probabilities, at least 1.
        maximum: reduce over queries by the maximum, not the sum.
        sinks: float32 [H, Q], or None.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor
    weights: Tensor
    scale: float
    power: float
    maximum: bool
    sinks: Tensor | None

    @property
    def scaled(self) -> Tensor:
        """float32 [H, Q, d]: the queries times the scale."""
        queries = self.queries.float()
        return queries if self.scale == 1.0 else queries * self.scale
