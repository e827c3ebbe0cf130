"""The attention that each position receives from the prompt's queries, a run of them at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.kernels.softmax_sums import softmax_columns


def add_column_sums(
    total: Tensor,
    queries: Tensor,
    keys: Tensor,
    first: int,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Add sum_u pi_{u,t} of a run of queries to `total`, float32 [H, T].

    One causal attention pass without values.

    Args:
        total: [H, T], changed in place; on the keys' device.
        queries: [H, C, d] of the positions first, first + 1, ...
        keys: [G, at least first + C, d].
        first: absolute position of the first query.
        scale: of the logits.
        softcap: of the logits; None: none.
        sinks: [H], sink logits; None: none.

    Source: the column sums of H2O (Zhang et al., 2023, arXiv:2306.14048).
    """
    end = first + queries.shape[1]
    seen = torch.arange(first + 1, end + 1)
    total[:, :end] += softmax_columns(
        queries.float() * scale, keys[:, :end], seen, softcap=softcap, sinks=sinks
    )
