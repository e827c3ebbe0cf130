"""What some models' attention does to logits before the softmax."""

from __future__ import annotations

from torch import Tensor


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap) of logits [any shape]; `logits` themselves if it is None.

    Masks and log multiplicities are added afterwards. Source: Gemma 2 (arXiv:2408.00118).
    """
    return logits if softcap is None else softcap * (logits / softcap).tanh()
