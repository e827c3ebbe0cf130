"""Reading ahead, against a plain reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.errors import ConfigError, PromptError
from gracekv.prefill import Region
from gracekv.testing import synthetic_prefill
from gracekv.value import ReadAhead, reference
from gracekv.value.read_ahead import spread_ahead


def small(**changes):
    sizes = {"prefix": 2, "context": 24, "question": 3, "tail": 2}
    return synthetic_prefill(dim=8, **(sizes | changes))


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    lookahead=st.integers(1, 30),
    power=st.sampled_from([1.0, 2.0]),
    max_weight=st.sampled_from([0.0, 0.02, 1.0]),
    question_probes=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_the_reference(seed, lookahead, power, max_weight, question_probes, dtype):
    prefill = small(seed=seed, dtype=dtype)
    # Probes of the tail reach into the region: they see less than all of it.
    region = Region(2, 28)
    scorer = ReadAhead(question_probes, 4, lookahead, power, max_weight)
    want = reference.read_ahead(scorer, prefill, region)
    torch.testing.assert_close(scorer(prefill, region).scores.double(), want, rtol=5e-5, atol=1e-7)


def test_a_spike_spreads_forward_only():
    spike = torch.tensor([0.0, 0, 4, 0, 0, 0, 0])
    assert spread_ahead(spike, 2).tolist() == [0, 0, 2, 1, 0.5, 0.25, 0.125]
    assert spread_ahead(spike, 1) is spike


def test_refuses_to_have_no_probes():
    with pytest.raises(ConfigError, match=r"ReadAhead.* takes"):
        ReadAhead(question_probes=0, tail_probes=0)


def test_a_prompt_without_a_question_has_no_question_probes():
    with pytest.raises(PromptError, match="tail_probes >= 1"):
        ReadAhead(question_probes=3, tail_probes=0)(small(question=0, tail=2), Region(2, 20))
