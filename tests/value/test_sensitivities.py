"""What each KV head is worth."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.errors import MissingCaptureError
from gracekv.prefill import Needs
from gracekv.testing import synthetic_prefill
from gracekv.value import OutputProjection, reference
from gracekv.value.output_projection import ProjectedNorms, ProjectionNorms


@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    question=st.integers(0, 40),
)
def test_output_projection_equals_the_reference(**shape):
    prefill = synthetic_prefill(dim=4, context=8, **shape)
    omega = OutputProjection()(prefill)
    slow = reference.output_projection(OutputProjection(), prefill)
    torch.testing.assert_close(omega.double(), slow, rtol=1e-5, atol=0)


@pytest.mark.parametrize("missing", [ProjectionNorms, ProjectedNorms])
def test_output_projection_needs_the_norms(missing):
    assert OutputProjection().needs() == Needs.observed(ProjectionNorms(), ProjectedNorms())
    prefill = synthetic_prefill().without(missing)
    with pytest.raises(MissingCaptureError, match=missing.__name__):
        OutputProjection()(prefill)
