import pytest
import torch

import gracekv
from gracekv.errors import MissingCaptureError
from gracekv.prefill import Needs
from gracekv.testing import check_observer, contracts, synthetic_prefill
from gracekv.testing.models import tiny_llama
from gracekv_rare_tokens.turning_values import TurningValues, ValueTurns


def test_the_strategy_keeps_the_promises_of_its_stage():
    contracts.check(TurningValues())


@pytest.mark.parametrize("seed", range(4))
def test_the_observer_keeps_the_contract(seed):
    check_observer(ValueTurns(), seed)


@pytest.mark.parametrize("chunk", [None, 7])
def test_what_is_captured_is_read_by_a_pipeline(chunk):
    model = tiny_llama()
    prompt = gracekv.Prompt.from_ids(torch.arange(60) * 7 % 97, (2, 50))
    options = gracekv.CaptureOptions(chunk=chunk)
    prefill = gracekv.capture(model, prompt, Needs.observed(ValueTurns()), options)
    values = torch.stack(prefill.values)
    cosines = torch.cosine_similarity(values[:, :, 1:], values[:, :, :-1], dim=-1)
    turns = prefill.observation(ValueTurns())
    torch.testing.assert_close(turns[..., 1:], 1 - cosines, rtol=1e-4, atol=1e-5)
    pipeline = gracekv.Pipeline.from_dict({"value": "turning_values"}, base="snapkv")
    result = gracekv.compress(model, prompt, pipeline=pipeline, ratio=4, capture=options)
    assert result.timings.query_sums > 0


def test_what_was_not_there_is_shown_the_captured_values():
    prefill = synthetic_prefill()
    region = prefill.spans.region(4)
    with pytest.raises(MissingCaptureError, match=r"ValueTurns\(\) has not observed"):
        TurningValues().layer(prefill.layer(0), region, {})
    seen = prefill.with_observations({ValueTurns()})
    scores = TurningValues()(prefill, region).scores
    torch.testing.assert_close(scores[1], TurningValues().layer(seen.layer(1), region, {}))


@pytest.mark.parametrize("recipe", ["rare_tokens", "turning_values"])
def test_it_is_compressed_while_it_is_read(recipe):
    model = tiny_llama(layers=3)
    prompt = gracekv.Prompt.from_ids(torch.arange(60) * 7 % 97, (2, 50))
    pipeline = gracekv.Pipeline.from_dict({"value": recipe}, base="snapkv")
    whole, streamed = (
        gracekv.compress(
            model,
            prompt,
            pipeline=pipeline,
            ratio=4,
            capture=gracekv.CaptureOptions(stream=stream),
        )
        for stream in (False, True)
    )
    for one, other in zip(whole.packed.layers, streamed.packed.layers, strict=True):
        assert torch.equal(one.positions, other.positions)
