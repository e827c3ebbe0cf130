"""ChunkKV's order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.testing import synthetic_prefill
from gracekv.value import (
    ChunkOrder,
    Recency,
    Scorer,
    WindowAttention,
    reference,
)


@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 4),
    context=st.integers(1, 45),
    chunk_size=st.integers(1, 12),
    share_heads=st.booleans(),
    reuse_layers=st.integers(1, 3),
    of=st.sampled_from([WindowAttention(pooling="none"), Recency(), WindowAttention(kernel=7)]),
)
def test_equals_the_reference(seed, layers, context, chunk_size, share_heads, reuse_layers, of):
    # Two float32 scores and a chunk of them sum exactly in float64: the same ties on every CPU.
    prefill = synthetic_prefill(layers=layers, kv_heads=2, dim=8, context=context, seed=seed)
    region = prefill.spans.region(0)
    scorer = ChunkOrder(of, chunk_size, share_heads, reuse_layers)
    tokens = scorer(prefill, region).scores
    order = tokens.sort(dim=-1, descending=True, stable=True).indices
    assert order.tolist() == reference.chunk_order(scorer, of(prefill, region).scores)
    torch.testing.assert_close(tokens.sum(-1), torch.ones(layers, 2))
    # Ranks, so no two tokens of a head tie.
    assert all(len(row.unique()) == context for row in tokens.flatten(0, 1))


class Fixed(Scorer):
    """Given scores."""

    def __init__(self, tokens):
        self.scores = torch.tensor(tokens)

    def layer(self, capture, region, memory):
        return self.scores[capture.number]


def ranking(tokens, **fields):
    sizes = {"layers": len(tokens), "kv_heads": len(tokens[0])}
    prefill = synthetic_prefill(context=len(tokens[0][0]), **sizes)
    scores = ChunkOrder(scorer=Fixed(tokens), **fields)(prefill, prefill.spans.region(0)).scores
    return scores.argsort(dim=-1, descending=True).tolist()


def test_by_hand():
    rows = [[1.0, 0, 5, 5, 9], [1.0, 0, 0, 0, 0]]
    # Summed over heads: chunks (2, 0), (5, 5), (9): means 1, 5, 9.
    assert ranking([rows], chunk_size=2) == [[[4, 2, 3, 0, 1]] * 2]
    # The second head alone: chunk means 0.5, 0, 0.
    assert ranking([rows], chunk_size=2, share_heads=False)[0][1] == [0, 1, 2, 3, 4]
