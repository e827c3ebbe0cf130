"""Shares between those of one top-k over all heads and equal ones."""

from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.allocate import BudgetPlan, GlobalMix
from gracekv.allocate.adaptive_heads import winners
from gracekv.allocate.plan import equal_shares
from gracekv.errors import ConfigError


@st.composite
def problems(draw):
    """Scores, often tied, and a plan over them."""
    layers, heads, count = (draw(st.integers(1, most)) for most in (3, 3, 16))
    recent = draw(st.integers(0, 4))
    base = draw(st.integers(0, layers * heads * count))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([1, 3, 1000]))
    tokens = torch.randint(0, levels, (layers, heads, count), generator=rng) / levels
    plan = BudgetPlan(layers, heads, count + recent, base + layers * heads * recent, recent)
    return tokens, plan


def plain(scores, plan, share):
    """The safeguard, token by token: first what heads are sure of, then the best of all heads."""
    heads = plan.layers * plan.heads
    held = Fraction(share) * (plan.base // heads + plan.recent)
    sure = max(0, (max(1, floor(held)) if share else 0) - plan.recent)
    order = []
    for head, own in enumerate(scores.flatten(0, 1).tolist()):
        ranked = sorted(range(len(own)), key=lambda t: (-own[t], t))
        for place, token in enumerate(ranked):
            order.append((place >= sure, -own[token] if place >= sure else 0, head, token))
    counts = [0] * heads
    for _, _, head, _ in sorted(order)[: plan.base]:
        counts[head] += 1
    return counts


@given(problem=problems(), share=st.sampled_from(["0", "0.25", "0.5", "1"]))
def test_safeguard_equals_the_plain_form(problem, share):
    scores, plan = problem
    got = GlobalMix(float(share))(scores, plan)
    assert got.flatten().tolist() == plain(scores, plan, share if float(share) else 0)


@given(problem=problems(), share=st.sampled_from([0.0, 0.25, 0.7, 1.0]))
def test_a_mix_lies_between_global_and_equal(problem, share):
    scores, plan = problem
    got = GlobalMix(share, "mix")(scores, plan).flatten().double()
    won = winners(scores.flatten(0, 1), plan.base).double()
    equal = plan.base / (plan.layers * plan.heads)
    assert int(got.sum()) == plan.base
    assert float((got - ((1 - share) * won + share * equal)).abs().max()) < 1 + 1e-9


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
