"""Reading ahead: how attention spreads, and refusals."""

import pytest
import torch

from gracekv.errors import ConfigError, PromptError
from gracekv.prefill import Region
from gracekv.testing import synthetic_prefill
from gracekv.value import ReadAhead
from gracekv.value.read_ahead import spread_ahead


def test_a_spike_spreads_forward_only():
    spike = torch.tensor([0.0, 0, 4, 0, 0, 0, 0])
    assert spread_ahead(spike, 2).tolist() == [0, 0, 2, 1, 0.5, 0.25, 0.125]
    assert spread_ahead(spike, 1) is spike


def test_refuses_to_have_no_probes():
    with pytest.raises(ConfigError, match=r"ReadAhead.* takes"):
        ReadAhead(question_probes=0, tail_probes=0)


def test_a_prompt_without_a_question_has_no_question_probes():
    prefill = synthetic_prefill(question=0)
    with pytest.raises(PromptError, match="tail_probes >= 1"):
        ReadAhead(question_probes=3, tail_probes=0)(prefill, Region(2, 20))
