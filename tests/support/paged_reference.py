"""Attention over a context and a sequence's own keys and values, in loops and float64."""

from torch import Tensor

from gracekv.backends.base import AttentionStep
from gracekv.backends.reference import attention
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
    asked, keys, values = (x.transpose(0, 1)[None] for x in (query, keys, values))
    output, _ = attention(AttentionStep(asked, layer, keys, values, scale))
    return output[0].transpose(0, 1)
