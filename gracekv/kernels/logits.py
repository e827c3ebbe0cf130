"""Softcaps and sinks of attention logits."""

from __future__ import annotations

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
