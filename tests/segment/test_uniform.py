import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracekv.prefill import Region
from gracekv.segment import Uniform
from gracekv.testing import synthetic_prefill

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
