"""SnapKV's score."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.testing import synthetic_prefill
from gracekv.value import WindowAttention, reference


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
    pooling=st.sampled_from(["max", "avg", "none"]),
    kernel=st.sampled_from([1, 3, 7]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_the_reference(seed, context, recent, window, pooling, kernel, dtype):
    prefill = small(seed, context, dtype)
    region = prefill.spans.region(recent)
    scorer = WindowAttention(window, pooling, kernel)
    fast, slow = scorer(prefill, region).scores, reference.window_attention(scorer, prefill, region)
    # float32 sums against float64; bfloat16 inputs are raised before any arithmetic.
    torch.testing.assert_close(fast.double(), slow, rtol=5e-5, atol=1e-7)
