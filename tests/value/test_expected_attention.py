"""Expected Attention: its blocks, the queries' moments and the mean rotation."""

import dataclasses

import pytest
import torch

from gracekv.kernels.rope import Rope
from gracekv.testing import synthetic_prefill
from gracekv.value import ExpectedAttention
from gracekv.value import expected_attention as module
from gracekv.value.expected_attention import QueryMoments, mean_rotation


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
        # The rows of entries before a passage have other positions.
        mixed = Rope(*(torch.cat([x[:1].expand(30, -1), x[30:]]) for x in (short.cos, short.sin)))
        got = rows @ mean_rotation(mixed, 16, start, 512, 30)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    # In 16 bits the first two rows after others hardly tell how far a position turns.
    half = Rope(*(x.bfloat16().float() for x in (mixed.cos, mixed.sin)))
    got = rows @ mean_rotation(half, 16, 100, 512, 30)
    assert (got - want).abs().max() < 0.01 * factor * rows.abs().max()
