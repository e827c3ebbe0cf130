"""Token scores, often tied, and a plan over them."""

import torch
from hypothesis import strategies as st

from gracekv.allocate import BudgetPlan


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
