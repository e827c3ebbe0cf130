"""A rival captures what it reads and no more."""

import dataclasses

import pytest
import torch

from gracekv import Budget, Pipeline, recipes
from gracekv.hf.capture import EVERYTHING, capture
from gracekv.prefill.prompt import Prompt
from gracekv.testing.models import tiny_llama

NAMES = [name for name in recipes.names() if not name.startswith("gracekv")]


@pytest.fixture(scope="module")
def setting():
    ids = torch.randint(0, 97, (160,), generator=torch.Generator().manual_seed(2))
    return tiny_llama(), Prompt.from_ids(ids, context=(3, 150))


@pytest.mark.parametrize("name", NAMES)
def test_the_declared_capture_is_enough(setting, name):
    model, prompt = setting
    pipeline = Pipeline.named(name)
    lean, full = (
        pipeline.run(capture(model, prompt, needs), Budget.ratio(3))
        for needs in (pipeline.needs(), pipeline.needs() | EVERYTHING)
    )
    for a, b in zip(lean.cache.layers, full.cache.layers, strict=True):
        assert a.tensors().keys() == b.tensors().keys()
        for part, tensor in a.tensors().items():
            assert torch.equal(tensor, b.tensors()[part])


@pytest.mark.parametrize("name", ["snapkv", "ada-snapkv", "pyramidkv", "chunkkv", "streaming-llm"])
def test_window_methods_keep_the_queries_of_two_windows(setting, name):
    model, prompt = setting
    prefill = capture(model, prompt, Pipeline.named(name).needs())
    # The last 32 of the prompt, 128 to 160, and of the context, 118 to 150.
    assert prefill.query_positions.tolist() == list(range(118, 160))


@pytest.mark.parametrize("observation", ["prompt_tail", "context_tail"])
def test_a_wide_window_is_captured_whole(setting, observation):
    model, prompt = setting
    pipeline = Pipeline.named("snapkv")
    value = dataclasses.replace(pipeline.value, window=70, observation=observation)
    pipeline = dataclasses.replace(pipeline, value=value)
    prefill = capture(model, prompt, pipeline.needs())
    assert set(value.observers(prompt.spans)) <= set(prefill.query_positions.tolist())
    assert pipeline.run(prefill, Budget.ratio(3)).accounting.spent == 147 * 4 // 3
