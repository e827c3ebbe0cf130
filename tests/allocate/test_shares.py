"""Shares and quotas in whole entries: they add up and follow their rules."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.allocate import AdaptiveHeads, Budget, BudgetPlan, Density, Global, PerHead, Pyramid
from gracekv.allocate.adaptive_heads import winners
from gracekv.allocate.density import proportional
from gracekv.allocate.plan import equal_shares, largest_remainder
from gracekv.allocate.reference import adaptive_heads
from gracekv.errors import BudgetError, ConfigError
from support.draws import SEEDS, floats, ints, lists, some


# Fewer examples would miss a share that is rounded the wrong way.
@settings(max_examples=200)
@given(
    weights=lists(ints(0, 40), min_size=1, max_size=9).filter(any),
    total=ints(0, 300),
    slack=ints(0, 60),
)
def test_shares_add_up_stay_below_the_cap_and_near_what_was_wanted(weights, total, slack):
    wanted = [Fraction(total * weight, sum(weights)) for weight in weights]
    cap = -(-total // len(weights)) + slack
    shares = largest_remainder(wanted, total, cap)
    assert sum(shares) == total
    assert max(shares) <= cap
    if max(wanted) <= cap:
        assert all(abs(share - want) < 1 for share, want in zip(shares, wanted, strict=True))


@pytest.mark.parametrize(("wanted", "total", "cap", "expected"), [
    ([Fraction(5, 2)] * 3 + [Fraction(1, 2)], 8, 9, [3, 3, 2, 0]),  # ties: the earlier
    ([Fraction(13, 10), Fraction(17, 10)], 3, 9, [1, 2]),
    ([Fraction(9), Fraction(1, 3), Fraction(2, 3)], 10, 4, [4, 3, 3]),  # the cap's surplus
    ([Fraction(9), Fraction(0)], 9, 5, [5, 4]),
    ([Fraction(0)], 0, 0, [0]),
])  # fmt: skip
def test_by_hand(wanted, total, cap, expected):
    assert largest_remainder(wanted, total, cap) == expected


@pytest.mark.parametrize(
    ("wanted", "total", "cap"),
    [([Fraction(3)], 2, 9), ([Fraction(3)], 3, 2), ([Fraction(-1), Fraction(4)], 3, 9)],
)
def test_refuses_what_cannot_add_up(wanted, total, cap):
    with pytest.raises(BudgetError, match="cannot be divided"):
        largest_remainder(wanted, total, cap)


@given(layers=ints(1, 5), heads=ints(1, 5), recent=ints(0, 4), base=ints(0, 200))
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
    assert Global()(tokens, plan) is None


@given(
    seed=SEEDS, layers=ints(1, 40), heads=ints(1, 8), context=ints(2, 400), recent=ints(0, 8),
    share=floats(0, 1), spread=floats(0, 4),
)  # fmt: skip
def test_shares_add_up_within_their_limits(seed, layers, heads, context, recent, share, spread):
    recent = min(recent, context - 1)
    floor = layers * heads * recent
    total = floor + int(share * (layers * heads * context - floor))
    plan = BudgetPlan(layers, heads, context, total, recent)
    rng = torch.Generator().manual_seed(seed)
    caps = Density()(torch.rand(layers, 2 * heads, context + 5, generator=rng) ** spread, plan)
    assert caps.shape == (layers, heads)
    assert caps.dtype == torch.int64
    assert int(caps.sum()) == plan.base
    assert int(caps.max()) <= plan.compressible
    assert int(caps.min()) >= (1 if plan.base >= layers * heads else 0)
    # Heads of a layer share equally; the first ones take the remainder.
    assert bool((caps[:, :1] - caps <= 1).all())
    assert bool((caps.diff(dim=1) <= 0).all())


def test_weights_by_hand():
    """Variances 0, 2 | 0, 2, 1 ...: normalised over heads, averaged, softmax of the negative."""
    scales = torch.tensor([[0.0, 2.0, 1.0], [0.0, 100.0, 0.0]])
    columns = 5 + scales[..., None].sqrt() * torch.tensor([-1.0, 0.0, 1.0])
    # Layer 0: v = 0, 2, 1 -> 0, 1, 1/2; layer 1: 0, 100, 0 -> 0, 1, 0.
    want = torch.softmax(-torch.tensor([0.5, 1 / 3], dtype=torch.float64), dim=0)
    torch.testing.assert_close(Density().weights(columns), want, rtol=1e-5, atol=1e-6)


def test_what_limits_take_is_redistributed_in_proportion():
    weights = [Fraction(1), Fraction(2), Fraction(7)]
    assert proportional(weights, 100, 0, 100) == [10, 20, 70]
    assert proportional(weights, 100, 0, 40) == [20, 40, 40]
    assert proportional(weights, 100, 15, 100) == [15, Fraction(170, 9), Fraction(595, 9)]
    # Both limits apply at first, but the scale that adds up does not clamp the small weight.
    assert proportional(weights, 100, 12, 45) == [Fraction(55, 3), Fraction(110, 3), 45]
    assert proportional(weights, 30, 10, 45) == [10, 10, 10]


@given(
    weights=lists(ints(1, 1000), min_size=1, max_size=20),
    least=ints(0, 20),
    extra=ints(0, 100),
    share=st.fractions(0, 1),
)
def test_one_scale_explains_all_proportional_shares(weights, least, extra, share):
    most = least + extra
    total = len(weights) * least + int(share * len(weights) * extra)
    shares = proportional([Fraction(w) for w in weights], total, least, most)
    assert sum(shares) == total
    assert all(least <= x <= most for x in shares)
    scales = {x / w for x, w in zip(shares, weights, strict=True) if least < x < most}
    assert len(scales) <= 1
    for scale in scales:
        assert shares == [min(max(scale * w, Fraction(least)), Fraction(most)) for w in weights]


def test_needs_a_positive_epsilon():
    with pytest.raises(ConfigError, match="> 0"):
        Density(epsilon=0.0)


def shares(quota, plan):
    return quota(torch.zeros(plan.layers, plan.heads, plan.compressible), plan)


@settings(max_examples=200)
@given(
    layers=ints(1, 80), heads=ints(1, 8), context=ints(64, 32768), ratio=floats(1.5, 16),
    beta=some([1.0, 2.5, 20.0]),
)  # fmt: skip
def test_spends_exactly_the_budget_and_falls_with_depth(layers, heads, context, ratio, beta):
    plan = Budget.ratio(ratio).plan(layers=layers, heads=heads, context=context, entry_bytes=8)
    got = shares(Pyramid(beta), plan)
    assert int(got.sum()) == plan.base
    assert bool(((got >= 0) & (got <= plan.compressible)).all())
    assert bool((got.sum(1).diff() <= 0).all())
    assert bool((got.diff(dim=1) <= 0).all())
    assert int((got.amax(1) - got.amin(1)).max()) <= 1
    for row, share in zip(got.tolist(), Pyramid(beta).layer_shares(plan), strict=True):
        assert abs(sum(row) - heads * share) < 1


def test_pyramid_by_hand():
    plan = BudgetPlan(layers=3, heads=2, context=1000, total=6 * 120, recent=20)
    # m = 100: the last layer gets 5, the first 195.
    assert Pyramid().layer_shares(plan) == [195, 100, 5]
    assert shares(Pyramid(), plan).tolist() == [[195, 195], [100, 100], [5, 5]]
    # The first layer cannot hold more than there is; the last one gets the difference.
    short = BudgetPlan(layers=3, heads=2, context=170, total=6 * 120, recent=20)
    assert Pyramid().layer_shares(short) == [150, 100, 50]


@st.composite
def scored_plans(draw):
    """Scores [L, G, N] and a `BudgetPlan`."""
    layers, heads, count = (draw(st.integers(1, most)) for most in (3, 4, 20))
    recent = draw(st.integers(0, 6))
    base = draw(st.integers(0, layers * heads * count))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([1, 3, 1000]))
    tokens = torch.randint(0, levels, (layers, heads, count), generator=rng) / levels
    return tokens, BudgetPlan(layers, heads, count + recent, base + layers * heads * recent, recent)


@given(problem=scored_plans(), floor=some([0.0, 0.2, 0.35, 1.0]), rule=some(["mix", "safeguard"]))
def test_equals_the_reference_and_leaves_layers_equal(problem, floor, rule):
    tokens, plan = problem
    quota = AdaptiveHeads(floor, rule)
    got = quota(tokens, plan)
    assert got.tolist() == adaptive_heads(quota, tokens, plan)
    assert torch.equal(got.sum(1), equal_shares(plan).sum(1))
    assert bool((got <= plan.compressible).all())


def test_adaptive_heads_by_hand():
    tokens = torch.tensor([[[9.0, 8, 7, 6, 5], [4.0, 1, 1, 1, 0]]])
    plan = BudgetPlan(layers=1, heads=2, context=7, total=10, recent=2)
    # Six entries: five winners in the first head, one in the second; a fifth is shared equally.
    assert winners(tokens[0], 6).tolist() == [5, 1]
    assert AdaptiveHeads()(tokens, plan).tolist() == [[5, 1]]  # 4.6 and 1.4
    assert AdaptiveHeads(floor=0.5)(tokens, plan).tolist() == [[4, 2]]
    # Each head is guaranteed 0.8 of its 5 entries, two of which are its recent window.
    assert AdaptiveHeads(0.8, "safeguard")(tokens, plan).tolist() == [[4, 2]]
