import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.segment import reference
from gracekv.segment.curvature_dp import robust_zscore


@given(
    length=st.integers(1, 40),
    spread=st.sampled_from([1, 5, 10**6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_matches_reference(length, spread, seed):
    # Few distinct values, so that zero MADs and equal middles occur.
    rng = torch.Generator().manual_seed(seed)
    signal = torch.randint(-spread, spread + 1, (length,), generator=rng).double()
    np.testing.assert_allclose(
        robust_zscore(signal).numpy(), reference.robust_zscore(signal.tolist()), rtol=1e-12
    )


def test_computes_in_float64_whatever_comes_in():
    assert robust_zscore(torch.arange(4, dtype=torch.float16)).dtype == torch.float64
