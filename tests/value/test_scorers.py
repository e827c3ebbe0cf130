"""What every registered scorer promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.testing import contracts, synthetic_prefill
from gracekv.value import SCORERS
from gracekv.value.base import mean_seed_scores


@pytest.mark.parametrize("name", list(SCORERS))
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    context=st.integers(1, 80),
    recent=st.integers(0, 16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_scores_are_finite_non_negative_float32_and_repeatable(name, seed, context, recent, dtype):
    prefill = synthetic_prefill(layers=3, dim=8, context=context, seed=seed, dtype=dtype)
    region = prefill.spans.region(min(recent, context - 1))
    contracts.check_scorer(SCORERS.build(name), prefill, region)


def test_seed_scores_are_the_normalised_mean_over_heads():
    tokens = torch.tensor([[[1.0, 0.0, 3.0]], [[1.0, 4.0, 1.0]]])
    torch.testing.assert_close(mean_seed_scores(tokens), torch.tensor([0.2, 0.4, 0.4]))
    assert not mean_seed_scores(torch.zeros(1, 1, 3)).any()
