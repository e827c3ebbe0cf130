"""Attention probabilities of chosen positions (probes), and sums over probes for each token.

Source: Eq. (V1); computing sums in blocks of probes is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from gracekv.kernels.logits import capped, softmax
from gracekv.kernels.softmax_sums import softmax_columns
from gracekv.prefill import Prefill, Region


def attention_probabilities(prefill: Prefill, layer: int, probes: Sequence[int] | Tensor) -> Tensor:
    """pi: attention of each probe over the tokens up to its own position, float32 [H, P, S].

    Args:
        prefill: H query heads that share G KV heads.
        layer: 0-based.
        probes: P >= 1 absolute positions.

    S = max(probes) + 1, since no probe sees a later key. Columns after a probe's own position are
    exactly 0; each row sums to 1, less the share of a sink. Keys and queries are converted to
    float32 before the product.

    Raises `MissingCaptureError` if a probe's query was not captured.
    """
    at = torch.as_tensor(probes, dtype=torch.int64, device="cpu")
    keys, heads = prefill.keys[layer], prefill.kv_heads
    after, stop = int(at.min()) + 1, int(at.max()) + 1
    queries = prefill.queries_at(layer, at).float() * prefill.scale
    # One product per KV head for all query heads that share it: K is never repeated.
    shared = rearrange(queries, "(g n) p d -> g (n p) d", g=heads)
    logits = shared @ keys[:, :stop].float().transpose(1, 2)
    logits = rearrange(logits, "g (n p) s -> (g n) p s", p=len(at))
    finish = prefill.logits_of(layer)
    logits, sinks = capped(logits, finish["softcap"]), finish["sinks"]
    # All probes see the keys up to the earliest one; only the columns after it need a mask.
    unseen = torch.arange(after, stop) > at[:, None]
    logits[..., after:].masked_fill_(unseen.to(logits.device), -torch.inf)
    return softmax(logits, None if sinks is None else sinks[:, None, None])


def attention_sums(
    prefill: Prefill,
    layer: int,
    probes: Sequence[int] | Tensor,
    region: Region,
    weights: Tensor | None = None,
    *,
    power: float = 1.0,
    maximum: bool = False,
) -> Tensor:
    """sum_u w_u pi_{u,t}^power: weighted attention that each token receives, float32 [H, N].

    The softmax runs over all tokens up to the probe; the slice to the region comes after it.

    Args:
        prefill: H query heads.
        layer: 0-based.
        probes: P absolute positions.
        region: the N tokens that are scored.
        weights: w [P]; None: all 1.
        power: exponent, at least 1.
        maximum: maximum over probes instead of the sum.

    Raises `MissingCaptureError` if a probe's query was not captured.
    """
    at = torch.as_tensor(probes, dtype=torch.int64, device="cpu")
    queries = prefill.queries_at(layer, at).float() * prefill.scale
    columns = softmax_columns(
        queries,
        prefill.keys[layer],
        at + 1,
        weights,
        power=power,
        maximum=maximum,
        **prefill.logits_of(layer),
    )
    return columns[:, region.start : region.end]
