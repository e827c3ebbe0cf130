import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.errors import NonFiniteError
from gracekv.segment.curvature import Curvature, band_products, unit_states


@given(rows=st.integers(1, 150), width=st.integers(1, 140), seed=st.integers(0, 2**32 - 1))
def test_band_holds_the_upper_diagonals_of_the_gram_matrix(rows, width, seed):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gram = torch.nn.functional.pad(x @ x.T, (0, width))
    expected = torch.stack([gram[t, t : t + width] for t in range(rows)])
    torch.testing.assert_close(band_products(x, width), expected)
    around = torch.nn.functional.pad(x, (0, 0, 2, 3))
    torch.testing.assert_close(band_products(x, width, 2, 3), band_products(around, width))


def test_rows_have_unit_norm_unless_they_are_tiny():
    hidden = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e-8, 4e-8]], dtype=torch.float64)
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.03, 0.04]], dtype=torch.float64)
    torch.testing.assert_close(unit_states(hidden, 1e-6), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_refuses_states_that_are_not_finite(bad):
    hidden = torch.ones(5, 4, dtype=torch.float16)
    hidden[3, 1] = bad
    with pytest.raises(NonFiniteError, match="try bfloat16"):
        Curvature().of_states([torch.ones(5, 4), hidden])


def test_large_half_precision_states_do_not_overflow():
    hidden = torch.full((2, 4), 60_000.0, dtype=torch.float16)
    torch.testing.assert_close(
        unit_states(hidden, 1e-6), torch.full((2, 4), 0.5, dtype=torch.float64)
    )
