"""Attention logits as models finish them: capped, and joined by a sink in the softmax."""

from __future__ import annotations

import torch
from torch import Tensor


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """c tanh(x / c) of scaled products x [..., T], in place; as they are without a cap."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis, in place.

    Args:
        logits: [..., T], capped already.
        sinks: [..., 1], a logit more, which takes its share and says nothing; None: none.
    """
    if sinks is None:
        return torch.softmax(logits, dim=-1, out=logits)
    total = torch.logaddexp(logits.logsumexp(dim=-1, keepdim=True), sinks.to(logits))
    return logits.sub_(total).exp_()
