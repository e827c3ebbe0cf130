"""Scores with logit softcapping, or with sinks in the softmax, against float64."""

import dataclasses

import pytest
import torch

from gracekv.errors import BackendUnavailableError
from gracekv.kernels.softmax_sums import softmax_columns
from gracekv.testing import synthetic_prefill
from gracekv.value import BlockReplay, ColumnSums, Replay, WindowAttention, reference
from gracekv.value.scissorhands import attention_probabilities


@pytest.mark.parametrize(("softcap", "layers"), [(1.5, 0), (None, 2), (1.5, 2)])
def test_scores_equal_their_references(softcap, layers):
    """Capped, with sinks in `layers` layers, and both."""
    plain = synthetic_prefill(prefix=2, context=30, question=4, tail=2, dim=8)
    rng = torch.Generator().manual_seed(5)
    # Some sinks barely matter, others take most of the attention.
    sinks = tuple(torch.randn(plain.query_heads, generator=rng) * 3 for _ in range(layers))
    prefill = dataclasses.replace(plain, softcap=softcap, sink_logits=sinks)
    region, probe = prefill.spans.region(2), prefill.spans.length - 3
    for layer in range(prefill.layers):
        rows = attention_probabilities(prefill.layer(layer), [probe])
        for head in range(prefill.query_heads):
            want = torch.tensor(reference.attention_probability(prefill, layer, head, probe))
            torch.testing.assert_close(rows[head, 0].double(), want.double(), rtol=1e-4, atol=1e-7)
    replay = Replay(uniform_weight=1.0, max_queries=9)
    at, weights = replay.select_queries(prefill.layer(0), region, {})
    window, columns, blocks = WindowAttention(window=5), ColumnSums(), BlockReplay(12)
    for scorer, want in [
        (window, reference.window_attention(window, prefill, region)),
        (columns, reference.column_sums(prefill, region)),
        (replay, reference.replay(prefill, at, weights, region, replay.mean_power)),
        (blocks, reference.block_replay(blocks, prefill, region)),
    ]:
        got = scorer(prefill, region).scores
        torch.testing.assert_close(got.double(), want.double(), rtol=3e-4, atol=1e-6)
        assert (scorer(plain, region).scores - got).abs().max() > 1e-3


def test_engines_without_caps_say_so():
    queries, keys, seen = torch.randn(2, 3, 8), torch.randn(1, 5, 8), torch.tensor([3, 4, 5])
    with pytest.raises(BackendUnavailableError, match="does not support a logit softcap"):
        softmax_columns(queries, keys, seen, engine="numba", softcap=2.0)
