"""Norms of each head's part of the attention's output projection, for any kind of layer.

The projection is only ever called, so quantised and offloaded layers work as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from gracekv.distributed.sharding import own_columns
from gracekv.prefill.plain_weight import plain_weight

# Unit vectors that go through a projection at once.
_ROWS = 1024


def projected_norms(projection: Any, outputs: Tensor, groups: int) -> Tensor:
    """[G, P] float32: ||sum_{h in H(g)} W_O^h o_u^h||_2 at each of P positions.

    Args:
        projection: the layer's output projection, [.., H d] to [.., D]; a bias is taken off.
        outputs: [H, P, d] attention outputs before the projection.
        groups: G.

    Source: Eq. (V7) (dynamic strength, before its mean).
    """
    heads = outputs.shape[0]
    flat = rearrange(outputs, "h p d -> p h d")
    # Row g keeps the query heads of KV head g and holds zeros elsewhere.
    owner = torch.arange(heads, device=outputs.device) // (heads // groups)
    mine = owner == torch.arange(groups, device=outputs.device)[:, None]
    masked = torch.where(mine[:, None, :, None], flat, 0.0)
    rows, own = rearrange(masked, "g p h d -> g p (h d)"), own_columns(projection)
    projected = _without_bias(projection, rows) if own is None else rows @ own.mT
    norms: Tensor = torch.linalg.vector_norm(projected.float(), dim=-1)
    return norms


def projection_norms(projection: Any, outputs: Tensor) -> Tensor:
    """[H] float32: ||W_O^h||_F, from the weight if it is plain, else by calling the projection.

    Args:
        projection: the layer's output projection, [.., H d] to [.., D]; a bias is taken off.
        outputs: [H, P, d] as for `projected_norms`; only its shape, dtype and device are used.

    Source: Eq. (V7) (static strength, before its sum).
    """
    heads, _, dim = outputs.shape
    own = own_columns(projection)
    weight = plain_weight(projection) if own is None else own
    if weight is not None:
        columns = weight.float().square().sum(dim=0)
    else:
        unit = torch.eye(heads * dim, dtype=outputs.dtype, device=outputs.device)
        # Row i of the result is column i of the weight, whatever form that is stored in.
        columns = torch.cat(
            [
                _without_bias(projection, rows).float().square().sum(dim=-1)
                for rows in unit.split(_ROWS)
            ]
        )
    norms: Tensor = rearrange(columns, "(h d) -> h d", h=heads).sum(dim=-1).sqrt()
    return norms


def written_norms(projection: Any, values: Tensor, heads: int) -> Tensor:
    """[G, T] float32: mean over a KV head's query heads h of ||W_O^h v_t||_1.

    Args:
        projection: as for `projected_norms`.
        values: [G, T, d], of one KV head each; coordinates beyond the projection's are zeros.
        heads: H.

    Source: Feng et al. (2025), CriticalKV, arXiv:2502.03805.
    """
    weight = plain_weight(projection)
    if weight is None:
        size = getattr(projection, "in_features", heads * values.shape[-1])
        unit = torch.eye(size, dtype=values.dtype, device=values.device)
        weight = torch.cat([_without_bias(projection, rows) for rows in unit.split(_ROWS)]).T
    by_head = rearrange(
        weight.float(), "o (g n d) -> g n d o", g=len(values), n=heads // len(values)
    )
    rows = values[..., : by_head.shape[2]].float()
    norms = torch.zeros(values.shape[:2], device=values.device)
    for group, own in enumerate(by_head):
        for head in own:
            for part, place in zip(
                rows[group].split(_ROWS), norms[group].split(_ROWS), strict=True
            ):
                place += (part @ head).abs().sum(dim=-1) / len(own)
    return norms


def _without_bias(projection: Any, inputs: Tensor) -> Tensor:
    projected: Tensor = projection(inputs)
    if getattr(projection, "bias", None) is not None:
        projected = projected - projection(torch.zeros_like(inputs[..., :1, :]))
    return projected
