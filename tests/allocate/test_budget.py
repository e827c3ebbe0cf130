"""Budgets converted to entries."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracekv.allocate import Budget, RecentWindow
from gracekv.decode import Limit
from gracekv.errors import BudgetError, ConfigError


@pytest.mark.parametrize(
    ("removed", "ratio"), [(0, 1), (0.5, 2), (0.875, 8), ("0.9", 10), (Fraction(2, 3), 3)]
)
def test_a_share_removed_is_a_ratio(removed, ratio):
    assert Budget.compression_ratio(removed) == Budget.ratio(ratio)


@given(thousandths=st.integers(0, 990), units=st.integers(1, 40), context=st.integers(100, 9000))
def test_a_share_removed_is_exact(thousandths, units, context):
    shape = {"layers": 1, "heads": units, "context": context, "entry_bytes": 8}
    plan = Budget.compression_ratio(thousandths / 1000).plan(**shape, window=RecentWindow(0, 0))
    assert plan.total == units * context * (1000 - thousandths) // 1000


@pytest.mark.parametrize("removed", [1, 1.0, 8, -0.1, "nan", np.inf, None, True, "half", "1e-9999"])
def test_a_share_outside_its_range_is_refused(removed):
    with pytest.raises(BudgetError, match="compression_ratio"):
        Budget.compression_ratio(removed)


def test_a_ratio_below_one_hints_at_what_was_meant():
    with pytest.raises(BudgetError, match=r"at least 1.*ratio=4.*compression_ratio=0\.25"):
        Budget.ratio(0.25)
    for ratio in (-3, "1e-999"):
        with pytest.raises(BudgetError, match=rf"got {ratio!r}\.$"):
            Budget.ratio(ratio)


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


def test_numbers_of_numpy_are_budgets():
    for kind in (np.int64, np.uint8, np.float16, np.float32, np.float64):
        assert Budget.ratio(kind(8)) == Budget.ratio(8)
        assert Budget.kv_bytes(kind(64)) == Budget.kv_bytes(64)
    # As written: a tenth, not the nearest float32.
    assert Budget.compression_ratio(np.float32(0.1)) == Budget.compression_ratio("0.1")
    assert Budget.entries_per_head(np.int32(5)) == Budget.entries_per_head(5)
    assert Limit(entries_per_head=np.int64(50)).target(100, 10, 8) == 500
    for wrong in (np.float32("nan"), np.bool_(True), np.array([8])):
        with pytest.raises(BudgetError, match="ratio must be a"):
            Budget.ratio(wrong)
    for wrong in (np.float64(5.0), np.int64(0), 2.5):
        with pytest.raises(BudgetError, match="positive whole number"):
            Limit(entries_per_head=wrong)


def recent(window, entries, context=1000):
    shape = {"layers": 2, "heads": 3, "context": context, "entry_bytes": 8}
    return Budget.entries_per_head(entries).plan(**shape, window=window).recent


@pytest.mark.parametrize(
    ("entries", "paper", "at_most_half", "half"),
    [(200, 32, 32, 100), (40, 32, 20, 20), (21, 21, 10, 10), (7, 7, 4, 3), (5, 5, 4, 2)],
)
def test_rules(entries, paper, at_most_half, half):
    assert recent(RecentWindow(), entries) == paper
    assert recent(RecentWindow(share=0.5), entries) == at_most_half
    assert recent(RecentWindow(rule="half"), entries) == half


def test_half_keeps_the_last_token_and_no_more_than_there_is():
    assert recent(RecentWindow(minimum=1, rule="half"), 1) == 1
    assert recent(RecentWindow(rule="half"), 90, context=50) == 25


def test_refuses_an_unknown_rule():
    with pytest.raises(ConfigError, match=r"'fixed'.*'half'.*'third'"):
        RecentWindow(rule="third")
