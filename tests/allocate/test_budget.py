"""What a budget comes to in entries."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracekv.allocate import Budget, RecentWindow
from gracekv.errors import BudgetError, ConfigError


@pytest.mark.parametrize(
    ("removed", "ratio"), [(0, 1), (0.5, 2), (0.875, 8), ("0.9", 10), (Fraction(2, 3), 3)]
)
def test_a_share_removed_is_a_ratio(removed, ratio):
    assert Budget.compression_ratio(removed) == Budget.ratio(ratio)


@given(thousandths=st.integers(0, 990), units=st.integers(1, 40), context=st.integers(100, 9000))
def test_a_share_removed_is_exact(thousandths, units, context):
    budget = Budget.compression_ratio(thousandths / 1000)
    plan = budget.plan(
        layers=1, heads=units, context=context, entry_bytes=8, window=RecentWindow(0, 0)
    )
    assert plan.total == units * context * (1000 - thousandths) // 1000


@pytest.mark.parametrize("removed", [1, 1.0, 8, -0.1, "nan", float("inf"), None, True, "half"])
def test_a_share_outside_its_range_is_refused(removed):
    with pytest.raises(BudgetError, match="compression_ratio"):
        Budget.compression_ratio(removed)


def test_a_ratio_below_one_hints_at_what_was_meant():
    with pytest.raises(BudgetError, match=r"at least 1.*ratio=4.*compression_ratio=0\.25"):
        Budget.ratio(0.25)
    with pytest.raises(BudgetError, match=r"got -3\.$"):
        Budget.ratio(-3)


def test_a_plan_needs_no_prefill():
    shape = {"layers": 4, "heads": 2, "context": 1000, "entry_bytes": 128}
    assert Budget.kv_bytes(8 * 125 * 128).plan(**shape) == Budget.ratio(8).plan(**shape)
    with pytest.raises(BudgetError, match="ratio of at most 250"):
        Budget.ratio(300).plan(**shape)


@pytest.mark.parametrize(
    "fields", [{"size": -1}, {"minimum": -1}, {"size": 3}, {"share": 0.0}, {"share": 1.5}]
)
def test_bad_windows_are_refused(fields):
    with pytest.raises(ConfigError, match="RecentWindow"):
        RecentWindow(**fields)
