"""What each KV head is worth."""

import dataclasses

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
def test_output_projection_equals_the_reference(seed, layers, kv_heads, group, question):
    prefill = synthetic_prefill(
        layers=layers,
        kv_heads=kv_heads,
        group=group,
        dim=4,
        context=8,
        question=question,
        seed=seed,
    )
    omega = OutputProjection()(prefill)
    slow = reference.output_projection(OutputProjection(), prefill)
    torch.testing.assert_close(omega.double(), slow, rtol=1e-5, atol=0)


def test_output_projection_by_hand():
    prefill = dataclasses.replace(
        synthetic_prefill(layers=1, kv_heads=2, group=2, dim=4, context=8, question=2, tail=0),
        observed={
            ProjectionNorms(): torch.tensor([[3.0, 4.0, 0.0, 1.0]]),  # static strengths 5 and 1
            ProjectedNorms(): torch.tensor([[[10.0, 30.0], [1.0, 7.0]]]),  # means 20 and 4
        },
    )
    # raw 10 and 2, mean 6
    torch.testing.assert_close(OutputProjection()(prefill), torch.tensor([[10 / 6, 2 / 6]]))


@pytest.mark.parametrize("missing", [ProjectionNorms, ProjectedNorms])
def test_output_projection_needs_the_norms(missing):
    assert OutputProjection().needs() == Needs.observed(ProjectionNorms(), ProjectedNorms())
    prefill = synthetic_prefill().without(missing)
    with pytest.raises(MissingCaptureError, match=missing.__name__):
        OutputProjection()(prefill)
