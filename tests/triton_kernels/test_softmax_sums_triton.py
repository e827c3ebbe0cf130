"""Columns of softmax rows on GPUs, interpreted, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.kernels.softmax_sums import softmax_columns
from gracekv.kernels.softmax_sums_triton import split
from support.covering import LONG


@settings(max_examples=15 if LONG else 8)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups=st.integers(1, 2),
    group=st.integers(1, 3),
    count=st.integers(1, 300),
    length=st.integers(1, 150),
    dim=st.sampled_from([8, 20, 64, 80]),
    power=st.sampled_from([1.0, 1.5, 2.0]),
    maximum=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    has_sinks=st.booleans(),
)
def test_equals_the_torch_engine(
    seed, groups, group, count, length, dim, power, maximum, dtype, has_sinks
):
    made = torch.Generator().manual_seed(seed)
    queries = torch.randn(groups * group, count, dim, generator=made)
    keys = torch.randn(groups, length, dim, generator=made).to(dtype)
    seen = torch.randint(1, length + 1, (count,), generator=made)
    inputs = (queries, keys, seen, torch.rand(count, generator=made))
    sinks = 5 * torch.randn(len(queries), count, generator=made) if has_sinks else None
    got, want = (
        softmax_columns(*inputs, power=power, maximum=maximum, sinks=sinks, engine=engine)
        for engine in ("triton", "torch")
    )
    # Two bfloat16 parts of a query leave out 2^-17 of it, in logits of up to some thirty.
    tolerance = 2e-3 if dtype == torch.bfloat16 else 2e-4
    torch.testing.assert_close(got, want, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 0.0), (torch.float16, 2**-21), (torch.bfloat16, 2**-16)]
)
def test_parts_add_up(dtype, error):
    queries = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    parts = split(queries, dtype)
    assert parts.dtype == dtype
    rest = (parts.double().sum(0) - queries).abs()
    assert bool((rest <= error * queries.abs() + 1e-7 * (error > 0)).all())
