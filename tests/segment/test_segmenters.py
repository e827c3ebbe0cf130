"""Guarantees of every registered segmenter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.prefill import Region
from gracekv.segment import SEGMENTERS, Partition, Uniform
from gracekv.testing import contracts, synthetic_prefill
from gracekv.testing.selections import check_partition


@pytest.mark.parametrize("name", list(SEGMENTERS))
@settings(max_examples=15)
@given(context=st.integers(1, 300), recent=st.integers(0, 32), seed=st.integers(0, 2**32 - 1))
def test_covers_the_region_and_repeats_itself(name, context, recent, seed):
    prefill = synthetic_prefill(context=context, seed=seed)
    region = prefill.spans.region(min(recent, context - 1))
    contracts.check_segmenter(SEGMENTERS.build(name), prefill, region)


@pytest.mark.parametrize(("bounds", "curvature", "message"), [
    ([4, 20], None, "from end to end"), ([5, 21], None, "from end to end"),
    ([5, 20], torch.zeros(29), r"float \[30\]"),
    ([5, 20], torch.zeros(30, dtype=torch.int64), r"float \[30\]"),
    ([5, 20], torch.full((30,), torch.nan), "finite"), ([5.0, 20.0], None, "int64"),
])  # fmt: skip
def test_the_contract_check_bites(bounds, curvature, message):
    with pytest.raises(AssertionError, match=message):
        check_partition(Partition(torch.tensor(bounds), curvature), Region(5, 20), 30)


PREFILL = synthetic_prefill()


@given(start=st.integers(0, 9), length=st.integers(1, 3000), target=st.integers(1, 200))
def test_lengths_differ_by_at_most_one_and_no_other_count_is_nearer(start, length, target):
    lengths = Uniform(target)(PREFILL, Region(start, start + length)).lengths
    assert int(lengths.max() - lengths.min()) <= 1
    exact = length / target
    assert abs(len(lengths) - exact) <= 0.5 or (len(lengths) == 1 and exact < 0.5)


@pytest.mark.parametrize(("length", "slots"), [(1, 1), (64, 1), (95, 1), (96, 2), (8192, 128)])
def test_number_of_slots(length, slots):
    assert Uniform()(PREFILL, Region(3, 3 + length)).slots == slots
