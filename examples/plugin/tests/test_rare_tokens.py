import dataclasses

import pytest
import torch

from gracekv.errors import ConfigError
from gracekv.testing import contracts, synthetic_prefill
from gracekv_rare_tokens import RareTokens


def test_the_strategy_keeps_the_promises_of_its_stage():
    contracts.check(RareTokens())


def test_what_occurs_once_beats_what_occurs_twice():
    prefill = synthetic_prefill(context=20)
    start = prefill.spans.context_start
    ids = prefill.token_ids.clone()
    ids[start + 3] = ids[start + 5]
    prefill = dataclasses.replace(prefill, token_ids=ids)
    scores = RareTokens(power=2.0)(prefill, prefill.spans.region(recent=2)).scores
    want = torch.ones(18)
    want[[3, 5]] = 0.25
    torch.testing.assert_close(scores[0, 0], want)


def test_a_power_of_zero_is_refused():
    with pytest.raises(ConfigError, match=r"RareTokens\.power takes a number > 0"):
        RareTokens(power=0)
