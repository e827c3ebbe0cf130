"""Attention over packed entries and a tail, one query at a time in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.backends.base import AttentionStep
from gracekv.cache.entries import LayerEntries
from gracekv.kernels.linalg import capped


def attention(step: AttentionStep) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, d] and the lse of packed entries and tail [2, B, H, Tq], float64, CPU.

    `step.packed` is a `LayerEntries`; tensors may be on any device. Sink logits only change the
    output. A query that sees nothing has output 0 and lse -inf. Source: Eq. (T4).
    """
    layer: LayerEntries = step.packed
    batch, heads, tokens, _ = step.query.shape
    group, mask, sinks = heads // layer.heads, step.mask, step.sink_logits
    query, tail_keys, tail_values = (x.double().cpu() for x in (step.query, step.keys, step.values))
    output = torch.zeros_like(query)
    lse = torch.full((2, batch, heads, tokens), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        sequence = b // (batch // layer.sequences) if step.rows is None else int(step.rows[b])
        length = tail_keys.shape[2] if step.length is None else int(step.length[b])
        for h in range(heads):
            g = h // group
            held = (x.double().cpu() for x in layer.head(g, sequence))
            packed_keys, packed_values, _, log_multiplicity = held
            for t in range(tokens):
                packed = capped(packed_keys @ query[b, h, t] * step.scale, step.softcap)
                packed = packed + log_multiplicity
                tail = capped(tail_keys[b, g] @ query[b, h, t] * step.scale, step.softcap)
                if mask is None:
                    tail[length - tokens + t + 1 :] = -torch.inf
                else:
                    own = mask[b if len(mask) > 1 else 0, 0, t].cpu()
                    hidden = own.dtype == torch.bool
                    tail = tail.masked_fill(~own, -torch.inf) if hidden else tail + own.double()
                lse[0, b, h, t], lse[1, b, h, t] = packed.logsumexp(0), tail.logsumexp(0)
                logits = torch.cat([packed, tail])
                everything = torch.cat([packed_values, tail_values[b, g]])
                if sinks is not None:
                    logits = torch.cat([logits, sinks[h : h + 1].double().cpu()])
                    everything = torch.cat([everything, torch.zeros_like(query[b, h, :1])])
                if bool((logits > -torch.inf).any()):
                    output[b, h, t] = logits.softmax(0) @ everything
    return output, lse
