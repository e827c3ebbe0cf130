"""H2O's score."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.testing import synthetic_prefill
from gracekv.value import ColumnSums, reference


def small(seed=0, kv_heads=2, group=2, dtype=torch.float32):
    return synthetic_prefill(
        kv_heads=kv_heads, group=group, dim=8, prefix=2, context=20, question=3, tail=1,
        seed=seed, dtype=dtype,
    )  # fmt: skip


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_the_reference(seed, kv_heads, group, dtype):
    prefill = small(seed, kv_heads, group, dtype)
    region = prefill.spans.region(4)
    fast, slow = ColumnSums()(prefill, region).scores, reference.column_sums(prefill, region)
    # float32 sums against float64; bfloat16 inputs are raised before any arithmetic.
    torch.testing.assert_close(fast.double(), slow, rtol=5e-5, atol=1e-6)
