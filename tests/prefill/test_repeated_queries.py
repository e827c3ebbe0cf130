"""Queries of a second reading, against one stock reading of context and repetition."""

import pytest
import torch

from gracekv.errors import UnsupportedModelError
from gracekv.hf.capture import capture
from gracekv.prefill import Needs
from gracekv.prefill.options import CaptureOptions
from gracekv.prefill.prompt import Prompt
from gracekv.testing.models import tiny_llama
from gracekv.value.repeated_attention import RepeatedQueries
from support.prompts import random_prompt

PROMPT = random_prompt()
IDS = PROMPT.ids


@pytest.mark.parametrize("count", [512, 7])
@pytest.mark.parametrize("chunk", [4096, 20])
def test_equals_one_stock_reading(count, chunk):
    model, observer = tiny_llama(layers=3), RepeatedQueries(count, chunk)
    got = capture(model, PROMPT, Needs.observed(observer)).observation(observer)
    chosen = torch.linspace(5, 59, min(count, 55)).round().long()
    wanted = []
    for first in range(5, 60, chunk):
        last = min(first + chunk, 60)
        both = torch.cat([IDS[:60], IDS[max(5, first - 8) : first], IDS[66:], IDS[first:last]])
        whole = capture(model, Prompt.from_ids(both, (5, 60), len(both)), Needs(later_queries=True))
        at = chosen[(chosen >= first) & (chosen < last)] - last + len(both)
        view = whole.with_queries(at)
        wanted.append(torch.stack([view.queries_at(layer, at) for layer in range(3)]))
    torch.testing.assert_close(got, torch.cat(wanted, dim=2), rtol=1e-4, atol=1e-5)


def test_a_repetition_beyond_the_models_positions_is_refused_before_the_work():
    model = tiny_llama()
    model.config.max_position_embeddings = 100
    needs = Needs.observed(RepeatedQueries(8))
    with pytest.raises(
        UnsupportedModelError, match=r"RepeatedQueries.*takes 115 .*trained for 100"
    ):
        capture(model, PROMPT, needs)
    assert capture(model, PROMPT, needs, CaptureOptions(beyond_positions=True)).observed
    capture(model, PROMPT, Needs.observed(RepeatedQueries(8, 20)))
