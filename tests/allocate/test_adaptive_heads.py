"""Ada-KV's shares."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.allocate import AdaptiveHeads, BudgetPlan
from gracekv.allocate.adaptive_heads import winners
from gracekv.allocate.plan import equal_shares
from gracekv.allocate.reference import adaptive_heads
from support.scored_plans import scored_plans


@given(
    problem=scored_plans(),
    floor=st.sampled_from([0.0, 0.2, 0.35, 1.0]),
    rule=st.sampled_from(["mix", "safeguard"]),
)
def test_equals_the_reference_and_leaves_layers_equal(problem, floor, rule):
    tokens, plan = problem
    quota = AdaptiveHeads(floor, rule)
    got = quota(tokens, plan)
    assert got.tolist() == adaptive_heads(quota, tokens, plan)
    assert torch.equal(got.sum(1), equal_shares(plan).sum(1))
    assert bool((got <= plan.compressible).all())


@given(problem=scored_plans())
def test_a_floor_of_one_is_equal_and_of_zero_is_adaptive(problem):
    tokens, plan = problem
    pools = equal_shares(plan).sum(1).tolist()
    equal = AdaptiveHeads(floor=1.0)(tokens, plan)
    assert int((equal.amax(1) - equal.amin(1)).max()) <= 1
    adaptive = AdaptiveHeads(floor=0.0)(tokens, plan)
    for row, scores, pool in zip(adaptive, tokens, pools, strict=True):
        assert torch.equal(row, winners(scores, pool))


def test_by_hand():
    tokens = torch.tensor([[[9.0, 8, 7, 6, 5], [4.0, 1, 1, 1, 0]]])
    plan = BudgetPlan(layers=1, heads=2, context=7, total=10, recent=2)
    # Six entries: five winners in the first head, one in the second; a fifth in equal parts.
    assert winners(tokens[0], 6).tolist() == [5, 1]
    assert AdaptiveHeads()(tokens, plan).tolist() == [[5, 1]]  # 4.6 and 1.4
    assert AdaptiveHeads(floor=0.5)(tokens, plan).tolist() == [[4, 2]]
    # Each head is sure of 0.8 of its 5 entries, two of which are its recent window.
    assert AdaptiveHeads(0.8, "safeguard")(tokens, plan).tolist() == [[4, 2]]


def test_the_safeguard_gives_every_head_one_entry_at_least():
    tokens = torch.tensor([[[9.0, 8], [1.0, 0]]])
    plan = BudgetPlan(layers=1, heads=2, context=2, total=2, recent=0)
    assert AdaptiveHeads(0.0, "safeguard")(tokens, plan).tolist() == [[2, 0]]
    assert AdaptiveHeads(0.2, "safeguard")(tokens, plan).tolist() == [[1, 1]]


def test_ties_go_to_the_lower_head():
    assert winners(torch.ones(3, 4), 6).tolist() == [4, 2, 0]
    assert winners(torch.tensor([[1.0, 1], [2.0, 1], [1.0, 0]]), 3).tolist() == [2, 1, 0]
    plan = BudgetPlan(layers=1, heads=3, context=4, total=7, recent=0)
    assert AdaptiveHeads(floor=1.0)(torch.ones(1, 3, 4), plan).tolist() == [[3, 2, 2]]
