"""D2O's layer shares."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.allocate import BudgetPlan, Density
from gracekv.allocate.density import proportional
from gracekv.errors import ConfigError


@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 40),
    heads=st.integers(1, 8),
    context=st.integers(2, 400),
    recent=st.integers(0, 8),
    share=st.floats(0, 1),
    spread=st.floats(0, 4),
)
def test_shares_add_up_within_their_limits(seed, layers, heads, context, recent, share, spread):
    recent = min(recent, context - 1)
    floor = layers * heads * recent
    total = floor + int(share * (layers * heads * context - floor))
    plan = BudgetPlan(layers, heads, context, total, recent)
    rng = torch.Generator().manual_seed(seed)
    columns = torch.rand(layers, 2 * heads, context + 5, generator=rng) ** spread
    caps = Density()(columns, plan)
    assert caps.shape == (layers, heads)
    assert caps.dtype == torch.int64
    assert int(caps.sum()) == plan.base
    assert int(caps.max()) <= plan.compressible
    assert int(caps.min()) >= (1 if plan.base >= layers * heads else 0)
    # Heads of a layer share equally, the first ones take what is left over.
    assert bool((caps[:, :1] - caps <= 1).all())
    assert bool((caps.diff(dim=1) <= 0).all())


def test_weights_by_hand():
    """Variances 0, 2 | 0, 2, 1 ...: normalised over heads, averaged, softmax of the negative."""
    step = torch.tensor([-1.0, 0.0, 1.0])
    scales = torch.tensor([[0.0, 2.0, 1.0], [0.0, 100.0, 0.0]])
    columns = 5 + scales[..., None].sqrt() * step
    # Layer 0: v = 0, 2, 1 -> 0, 1, 1/2; layer 1: 0, 100, 0 -> 0, 1, 0.
    want = torch.softmax(-torch.tensor([0.5, 1 / 3], dtype=torch.float64), dim=0)
    torch.testing.assert_close(Density().weights(columns), want, rtol=1e-5, atol=1e-6)


def test_what_limits_take_is_redistributed_in_proportion():
    weights = [Fraction(1), Fraction(2), Fraction(7)]
    assert proportional(weights, 100, 0, 100) == [10, 20, 70]
    assert proportional(weights, 100, 0, 40) == [20, 40, 40]
    assert proportional(weights, 100, 15, 100) == [15, Fraction(170, 9), Fraction(595, 9)]
    # Both sides clamp at first, but the x that adds up leaves the small one alone.
    assert proportional(weights, 100, 12, 45) == [Fraction(55, 3), Fraction(110, 3), 45]
    assert proportional(weights, 30, 10, 45) == [10, 10, 10]


@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=20),
    least=st.integers(0, 20),
    extra=st.integers(0, 100),
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
        want = [min(max(scale * w, Fraction(least)), Fraction(most)) for w in weights]
        assert shares == want


def test_needs_a_positive_epsilon():
    with pytest.raises(ConfigError, match="> 0"):
        Density(epsilon=0.0)
