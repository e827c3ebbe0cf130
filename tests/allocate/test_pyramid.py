"""PyramidKV's shares."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.allocate import Budget, BudgetPlan, Pyramid


def plan_of(layers, heads, context, ratio):
    return Budget.ratio(ratio).plan(layers=layers, heads=heads, context=context, entry_bytes=8)


def shares(quota, plan):
    return quota(torch.zeros(plan.layers, plan.heads, plan.compressible), plan)


@settings(max_examples=200)
@given(
    layers=st.integers(1, 80),
    heads=st.integers(1, 8),
    context=st.integers(64, 32768),
    ratio=st.floats(1.5, 16),
    beta=st.sampled_from([1.0, 2.5, 20.0]),
)
def test_spends_exactly_the_budget_and_falls_with_depth(layers, heads, context, ratio, beta):
    plan = plan_of(layers, heads, context, ratio)
    got = shares(Pyramid(beta), plan)
    assert int(got.sum()) == plan.base
    assert bool(((got >= 0) & (got <= plan.compressible)).all())
    assert bool((got.sum(1).diff() <= 0).all())
    assert bool((got.diff(dim=1) <= 0).all())
    assert int((got.amax(1) - got.amin(1)).max()) <= 1
    wanted = Pyramid(beta).layer_shares(plan)
    for row, share in zip(got.tolist(), wanted, strict=True):
        assert abs(sum(row) - heads * share) < 1


def test_by_hand():
    plan = BudgetPlan(layers=3, heads=2, context=1000, total=6 * 120, recent=20)
    # m = 100: the last layer gets 5, the first 195.
    assert Pyramid().layer_shares(plan) == [195, 100, 5]
    assert shares(Pyramid(), plan).tolist() == [[195, 195], [100, 100], [5, 5]]
    # The first layer cannot hold more than there is; the last one gets the difference.
    short = BudgetPlan(layers=3, heads=2, context=170, total=6 * 120, recent=20)
    assert Pyramid().layer_shares(short) == [150, 100, 50]
