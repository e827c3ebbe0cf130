"""Expected Attention: against the reference, against kvpress's press, and what it must not read."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.kernels.rope import Rope
from gracekv.testing import synthetic_prefill
from gracekv.value import ExpectedAttention, reference
from gracekv.value import expected_attention as module
from gracekv.value.expected_attention import QueryMoments, mean_rotation


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    prefix=st.integers(0, 5),
    context=st.integers(1, 30),
    future_positions=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    value_norm=st.booleans(),
    epsilon=st.sampled_from([0.0, 0.01]),
)
def test_equals_the_reference(
    seed, kv_heads, group, prefix, context, future_positions, dtype, value_norm, epsilon
):
    prefill = synthetic_prefill(
        kv_heads=kv_heads, group=group, dim=8, prefix=prefix, context=context, question=9, tail=3,
        seed=seed, dtype=dtype,
    )  # fmt: skip
    region = prefill.spans.region(min(2, context - 1))
    scorer = ExpectedAttention(
        future_positions=future_positions, value_norm=value_norm, epsilon=epsilon
    )
    slow = reference.expected_attention(scorer, prefill, region)
    torch.testing.assert_close(scorer(prefill, region).scores.double(), slow, rtol=2e-4, atol=1e-6)


def test_blocks_change_nothing(monkeypatch):
    prefill = synthetic_prefill(context=300, layers=1)
    region = prefill.spans.region(4)
    want = ExpectedAttention()(prefill, region).scores
    monkeypatch.setattr(module, "_BLOCK", 1)
    got = ExpectedAttention()(prefill, region).scores
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)


def test_a_large_mean_costs_no_digits():
    prefill = synthetic_prefill(context=200, layers=1)
    want = prefill.observe(QueryMoments(4))[0, :, 1:]
    rope, at = prefill.rope, torch.arange(prefill.spans.length)
    moved = rope.rotate(rope.unrotate(prefill.queries[0], at) + 300.0, at)
    moments = dataclasses.replace(prefill, queries=(moved,)).observe(QueryMoments(4))[0]
    mean, got = moments[:, 0], moments[:, 1:]
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)
    assert float((mean - 300).abs().max()) < 10


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_mean_rotation_continues_the_table(factor):
    whole = Rope.of_theta(700, 12, theta=500.0)
    whole = Rope(whole.cos * factor, whole.sin * factor)
    short = Rope(whole.cos[:100], whole.sin[:100])
    rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    for start in (1, 60, 100):
        want = sum(whole.rotate(rows, torch.tensor(start + i)) for i in range(512)) / 512
        got = rows @ mean_rotation(short, 16, start, 512)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_sinks_in_the_region_outrank_everything():
    prefill = synthetic_prefill(prefix=1, context=40)
    tokens = ExpectedAttention()(prefill, prefill.spans.region(4)).scores
    assert bool((tokens[..., :3] > tokens[..., 3:].amax()).all())
    without = ExpectedAttention(sinks=0)(prefill, prefill.spans.region(4)).scores
    assert not bool((without[..., :3] > without[..., 3:].amax()).all())
