"""How strongly the attention's output projection carries each head, for any kind of layer.

The projection is only ever called, so quantised and offloaded layers work as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor


def projected_norms(projection: Any, outputs: Tensor, groups: int) -> Tensor:
    """[G, P] float32: ||sum_{h in H(g)} W_O^h o_u^h||_2 at each of P positions.

    Args:
        projection: the layer's output projection, [.., H d] to [.., D]; a bias is taken off.
        outputs: [H, P, d] attention outputs before the projection.
        groups: G.

    Source: the paper, Eq. app_head_sensitivity_raw (dynamic strength, before its mean).
    """
    heads = outputs.shape[0]
    flat = rearrange(outputs, "h p d -> p h d")
    # Row g keeps the query heads of KV head g and holds zeros elsewhere.
    owner = torch.arange(heads, device=outputs.device) // (heads // groups)
    mine = owner == torch.arange(groups, device=outputs.device)[:, None]
    masked = torch.where(mine[:, None, :, None], flat, 0.0)
    projected = _without_bias(projection, rearrange(masked, "g p h d -> g p (h d)"))
    norms: Tensor = torch.linalg.vector_norm(projected.float(), dim=-1)
    return norms


def projection_norms(projection: Any, heads: int) -> Tensor:
    """[H] float32: ||W_O^h||_F, from the weight, or by columns if the weight is quantised.

    Source: the paper, Eq. app_head_sensitivity_raw (static strength, before its sum).
    """
    width = projection.in_features
    weight = getattr(projection, "weight", None)
    if weight is not None and weight.is_floating_point() and weight.shape[-1:] == (width,):
        columns = weight.detach().float().square().sum(dim=0)
    else:
        dtype = getattr(projection, "compute_dtype", None) or torch.get_default_dtype()
        device = next(projection.parameters()).device
        unit = torch.eye(width, dtype=dtype, device=device)
        columns = _without_bias(projection, unit).float().square().sum(dim=-1)
    norms: Tensor = rearrange(columns, "(h d) -> h d", h=heads).sum(dim=-1).sqrt()
    return norms


def _without_bias(projection: Any, inputs: Tensor) -> Tensor:
    projected: Tensor = projection(inputs)
    if getattr(projection, "bias", None) is not None:
        projected = projected - projection(torch.zeros_like(inputs[..., :1, :]))
    return projected
