"""Shares between those of one top-k over all heads and equal ones."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.allocate import AdaptiveHeads, BudgetPlan, GlobalMix
from gracekv.allocate.plan import equal_shares
from gracekv.allocate.reference import adaptive_heads
from gracekv.errors import ConfigError
from support.scored_plans import scored_plans


@given(
    problem=scored_plans(),
    floor=st.sampled_from([0.0, 0.25, 0.7, 1.0]),
    rule=st.sampled_from(["mix", "safeguard"]),
)
def test_equals_the_reference_over_one_layer_of_all_heads(problem, floor, rule):
    scores, plan = problem
    whole = replace(plan, layers=1, heads=plan.layers * plan.heads)
    want = adaptive_heads(AdaptiveHeads(floor, rule), scores.flatten(0, 1)[None], whole)
    got = GlobalMix(floor, rule)(scores, plan)
    assert got.flatten().tolist() == want[0]
    assert int(got.sum()) == plan.base


def test_a_head_that_wins_nothing_gets_its_part():
    scores = torch.tensor([[[9.0, 8, 7, 6, 5, 4, 3, 2]], [[0.4, 0.3, 0.2, 0.1, 0, 0, 0, 0]]])
    plan = BudgetPlan(layers=2, heads=1, context=8, total=8, recent=0)
    assert GlobalMix(0.0)(scores, plan).tolist() == [[8], [0]]
    assert GlobalMix(0.25)(scores, plan).tolist() == [[7], [1]]
    assert GlobalMix(0.5, "mix")(scores, plan).tolist() == [[6], [2]]
    assert torch.equal(GlobalMix(1.0)(scores, plan), equal_shares(plan))


def test_a_share_beyond_one_is_refused():
    with pytest.raises(ConfigError, match="floor"):
        GlobalMix(floor=1.5)
