"""Attention to dense keys that also returns the log-sum-exp: torch's fused kernel and a plain one.

Each takes rows [B, G, R, d], keys and values [B, G, S, d], a bias to add to the logits or None, and
the factor of q . k; each returns output [B, G, R, d] and log-sum-exp [B, G, R].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from gracekv.kernels.logits import capped

Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


def fused(
    rows: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's flash attention for CPUs: output [B, H, M, d] and log-sum-exp [B, H, M].

    Args:
        rows: queries [B, H, M, d].
        keys: [B, H, E, d].
        values: [B, H, E, d].
        bias: of the logits [B, H, 1 or M, E], or None.
        scale: factor of q . k.
    """
    if bias is not None:
        bias = bias.expand(-1, -1, rows.shape[2], -1)
    output, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        rows, keys, values, attn_mask=bias, scale=scale
    )
    return output, lse


def plain(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`fused` by two matrix products in float32; logits are capped before the bias is added.

    Args:
        rows: queries [B, H, M, d].
        keys: [B, H, E, d].
        values: [B, H, E, d].
        bias: of the capped logits [B, H, 1 or M, E], or None.
        scale: factor of q . k.
        softcap: bound of the logits, or None.
    """
    # Half-precision products would round the logits to the model's dtype before the softmax.
    logits = capped(rows.float() @ keys.float().mT * scale, softcap)
    if bias is not None:
        logits = logits + bias
    top = logits.amax(dim=-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = (logits - top).exp()
    total = weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    output = (weights / total) @ values.float()
    return output.to(rows.dtype), (top + total.log())[..., 0]
