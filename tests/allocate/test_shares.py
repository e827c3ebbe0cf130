"""Whole shares that add up."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.allocate import BudgetPlan, PerHead
from gracekv.allocate.plan import equal_shares, largest_remainder
from gracekv.errors import BudgetError


# Few examples miss a share that is rounded the other way.
@settings(max_examples=200)
@given(
    weights=st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any),
    total=st.integers(0, 300),
    slack=st.integers(0, 60),
)
def test_shares_add_up_stay_below_the_cap_and_near_what_was_wanted(weights, total, slack):
    wanted = [Fraction(total * weight, sum(weights)) for weight in weights]
    cap = -(-total // len(weights)) + slack
    shares = largest_remainder(wanted, total, cap)
    assert sum(shares) == total
    assert max(shares) <= cap
    if max(wanted) <= cap:
        assert all(abs(share - want) < 1 for share, want in zip(shares, wanted, strict=True))


@pytest.mark.parametrize(
    ("wanted", "total", "cap", "expected"),
    [
        ([Fraction(5, 2)] * 3 + [Fraction(1, 2)], 8, 9, [3, 3, 2, 0]),  # ties: the earlier
        ([Fraction(13, 10), Fraction(17, 10)], 3, 9, [1, 2]),
        ([Fraction(9), Fraction(1, 3), Fraction(2, 3)], 10, 4, [4, 3, 3]),  # the cap's surplus
        ([Fraction(9), Fraction(0)], 9, 5, [5, 4]),
        ([Fraction(0)], 0, 0, [0]),
    ],
)
def test_by_hand(wanted, total, cap, expected):
    assert largest_remainder(wanted, total, cap) == expected


@pytest.mark.parametrize(
    ("wanted", "total", "cap"),
    [([Fraction(3)], 2, 9), ([Fraction(3)], 3, 2), ([Fraction(-1), Fraction(4)], 3, 9)],
)
def test_refuses_what_cannot_add_up(wanted, total, cap):
    with pytest.raises(BudgetError, match="cannot be shared out"):
        largest_remainder(wanted, total, cap)


@given(
    layers=st.integers(1, 5),
    heads=st.integers(1, 5),
    recent=st.integers(0, 4),
    base=st.integers(0, 200),
)
def test_equal_shares_spend_everything_and_favour_the_first(layers, heads, recent, base):
    units = layers * heads
    plan = BudgetPlan(layers, heads, context=500, total=base + units * recent, recent=recent)
    shares = equal_shares(plan)
    assert shares.shape == (layers, heads)
    assert int(shares.sum()) == base
    flat = shares.flatten().tolist()
    assert flat == sorted(flat, reverse=True)
    assert flat[0] - flat[-1] <= 1
    tokens = torch.zeros(layers, heads, 500 - recent)
    assert torch.equal(PerHead(remainder=True)(tokens, plan), shares)
    assert PerHead()(tokens, plan).eq(base // units).all()
