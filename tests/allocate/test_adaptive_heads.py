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


def test_by_hand():
    tokens = torch.tensor([[[9.0, 8, 7, 6, 5], [4.0, 1, 1, 1, 0]]])
    plan = BudgetPlan(layers=1, heads=2, context=7, total=10, recent=2)
    # Six entries: five winners in the first head, one in the second; a fifth in equal parts.
    assert winners(tokens[0], 6).tolist() == [5, 1]
    assert AdaptiveHeads()(tokens, plan).tolist() == [[5, 1]]  # 4.6 and 1.4
    assert AdaptiveHeads(floor=0.5)(tokens, plan).tolist() == [[4, 2]]
    # Each head is sure of 0.8 of its 5 entries, two of which are its recent window.
    assert AdaptiveHeads(0.8, "safeguard")(tokens, plan).tolist() == [[4, 2]]
