"""SnapKV's score."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.prefill import Region
from gracekv.testing import synthetic_prefill
from gracekv.value import WindowAttention, reference
from gracekv.value.scissorhands import attention_probabilities


def small(seed=0, context=30, dtype=torch.float32):
    return synthetic_prefill(
        dim=8, prefix=3, context=context, question=4, tail=2, seed=seed, dtype=dtype
    )


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    context=st.integers(4, 30),
    recent=st.integers(0, 3),
    window=st.integers(1, 12),
    observation=st.sampled_from(["prompt_tail", "context_tail"]),
    pooling=st.sampled_from(["max", "avg", "none"]),
    kernel=st.sampled_from([1, 3, 7]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_the_reference(seed, context, recent, window, observation, pooling, kernel, dtype):
    prefill = small(seed, context, dtype)
    region = prefill.spans.region(recent)
    scorer = WindowAttention(window, observation, pooling, kernel)
    fast, slow = scorer(prefill, region), reference.window_attention(scorer, prefill, region)
    # float32 sums against float64; bfloat16 inputs are raised before any arithmetic.
    torch.testing.assert_close(fast.scores.double(), slow.scores, rtol=5e-5, atol=1e-7)
    torch.testing.assert_close(fast.seed_scores.double(), slow.seed_scores, rtol=5e-5, atol=1e-7)


def test_the_mean_over_the_group_comes_before_max_pooling():
    prefill, region = small(), Region(3, 20)
    scorer = WindowAttention(window=6, kernel=3)
    heads = attention_probabilities(prefill.layer(0), range(33, 39)).mean(1)[:, 3:20]
    by_group = torch.stack([heads[:2].mean(0), heads[2:].mean(0)])

    def pool(rows):
        return torch.nn.functional.max_pool1d(rows, 3, stride=1, padding=1)

    got = scorer(prefill, region).scores[0]
    torch.testing.assert_close(got, pool(by_group))
    pooled_first = pool(heads)
    other = torch.stack([pooled_first[:2].mean(0), pooled_first[2:].mean(0)])
    assert not torch.allclose(got, other)  # the two orders do differ here


def test_pooling_never_sees_past_the_region():
    prefill = small()
    whole = WindowAttention(pooling="none")(prefill, Region(0, 33)).scores[0, 0]
    peak = int(whole[:20].argmax())
    region = Region(peak + 1, 20)  # the largest score lies just before it
    pooled = WindowAttention(pooling="max", kernel=7)(prefill, region).scores[0, 0]
    inside = whole[peak + 1 : 20].amax()
    assert inside < 0.9 * whole[peak]  # clearly less, so that seeing past the region shows
    torch.testing.assert_close(pooled.amax(), inside)


def test_average_pooling_counts_its_padding():
    prefill, region = small(), Region(3, 20)
    plain = WindowAttention(pooling="none")(prefill, region).scores
    pooled = WindowAttention(pooling="avg", kernel=5)(prefill, region).scores
    torch.testing.assert_close(pooled[..., 0], plain[..., :3].sum(-1) / 5)


@pytest.mark.parametrize(
    ("scorer", "expected"),
    [
        (WindowAttention(window=8), range(31, 39)),
        (WindowAttention(window=8, observation="context_tail"), range(25, 33)),
        (WindowAttention(window=99), range(39)),
        (WindowAttention(window=99, observation="context_tail"), range(3, 33)),
    ],
)
def test_observers(scorer, expected):
    assert scorer.observers(small().spans) == expected
