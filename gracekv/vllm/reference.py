"""Attention over a context and a sequence's own keys and values, in loops and float64."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries


def attend(
    query: Tensor, layer: RaggedEntries, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """[n, H, d] float64: the last n tokens of a sequence over a context and the sequence.

    Args:
        query: [n, H, d].
        layer: the context's entries in this layer; log multiplicities are added to the logits.
        keys: [S, G, d], the sequence so far, the n tokens at its end.
        values: [S, G, d].
        scale: factor of q . k.
    """
    count, heads, dim = query.shape
    group = heads // layer.heads
    output = torch.empty(count, heads, dim, dtype=torch.float64)
    for token in range(count):
        seen = len(keys) - count + token + 1
        for head in range(heads):
            g = head // group
            packed_keys, packed_values, _, log_m = layer.head(g)
            q = query[token, head].double()
            logits = torch.cat(
                [
                    scale * (packed_keys.double() @ q) + log_m.double(),
                    scale * (keys[:seen, g].double() @ q),
                ]
            )
            mixed = torch.cat([packed_values.double(), values[:seen, g].double()])
            output[token, head] = logits.softmax(0) @ mixed
    return output
