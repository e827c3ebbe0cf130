"""What every registered segmenter promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.errors import ShapeError
from gracekv.prefill import Region
from gracekv.segment import SEGMENTERS, Partition
from gracekv.testing import synthetic_prefill
from gracekv.testing.partitions import check_partition


@pytest.mark.parametrize("name", list(SEGMENTERS))
@settings(max_examples=15)
@given(context=st.integers(1, 300), recent=st.integers(0, 32), seed=st.integers(0, 2**32 - 1))
def test_covers_the_region_and_repeats_itself(name, context, recent, seed):
    prefill = synthetic_prefill(context=context, seed=seed)
    region = prefill.spans.region(min(recent, context - 1))
    segmenter = SEGMENTERS.build(name)
    first, second = segmenter(prefill, region), segmenter(prefill, region)
    check_partition(first, region, prefill.spans.length)
    assert torch.equal(first.bounds, second.bounds)


@pytest.mark.parametrize("name", list(SEGMENTERS))
def test_refuses_an_empty_region(name):
    with pytest.raises(ShapeError, match="bounds"):
        SEGMENTERS.build(name)(synthetic_prefill(), Region(20, 20))


@pytest.mark.parametrize("name", list(SEGMENTERS))
def test_is_a_value_that_survives_plain_data(name):
    segmenter = SEGMENTERS.build(name)
    assert SEGMENTERS.parse(segmenter.to_dict()) == segmenter
    assert hash(SEGMENTERS.build(name)) == hash(segmenter)
    assert segmenter.summary().endswith(".")


def test_the_papers_segmenter_and_its_ablations_are_registered():
    assert set(SEGMENTERS) >= {"curvature_dp", "uniform", "fixed_chunks", "tokens"}


@pytest.mark.parametrize(
    ("bounds", "curvature", "message"),
    [
        ([4, 20], None, "from end to end"),
        ([5, 21], None, "from end to end"),
        ([5, 20], torch.zeros(29), r"float \[30\]"),
        ([5, 20], torch.zeros(30, dtype=torch.int64), r"float \[30\]"),
        ([5, 20], torch.full((30,), torch.nan), "finite"),
    ],
)
def test_the_contract_check_bites(bounds, curvature, message):
    with pytest.raises(AssertionError, match=message):
        check_partition(Partition(torch.tensor(bounds), curvature), Region(5, 20), 30)


def test_the_contract_check_wants_whole_positions():
    with pytest.raises(AssertionError, match="int64"):
        check_partition(Partition(torch.tensor([5.0, 20.0])), Region(5, 20), 30)
