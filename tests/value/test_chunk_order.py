"""ChunkKV's order."""

import torch
from hypothesis import given

from gracekv.testing import synthetic_prefill
from gracekv.value import ChunkOrder, Recency, WindowAttention, reference
from support.draws import SEEDS, ints, some


@given(
    seed=SEEDS,
    layers=ints(1, 4),
    context=ints(1, 45),
    chunk_size=ints(1, 12),
    of=some([WindowAttention(pooling="none"), Recency(), WindowAttention(kernel=7)]),
)
def test_equals_the_reference(seed, layers, context, chunk_size, of):
    # Sums of two float32 scores, or of a chunk, are exact in float64: the same ties on every CPU.
    prefill = synthetic_prefill(layers=layers, kv_heads=2, dim=8, context=context, seed=seed)
    region = prefill.spans.region(0)
    scorer = ChunkOrder(of, chunk_size)
    tokens = scorer(prefill, region).scores
    order = tokens.sort(dim=-1, descending=True, stable=True).indices
    assert order.tolist() == reference.chunk_order(scorer, of(prefill, region).scores)
    torch.testing.assert_close(tokens.sum(-1), torch.ones(layers, 2))
    # Ranks, so no two tokens of a head tie.
    assert all(len(row.unique()) == context for row in tokens.flatten(0, 1))
