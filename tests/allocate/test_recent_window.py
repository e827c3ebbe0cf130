"""How many recent tokens are kept."""

import pytest

from gracekv.allocate import Budget, RecentWindow
from gracekv.errors import ConfigError


def recent(window, entries, context=1000):
    plan = Budget.entries_per_head(entries).plan(
        layers=2, heads=3, context=context, entry_bytes=8, window=window
    )
    return plan.recent


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
