"""A rival captures only what it reads."""

import pytest
import torch

from gracekv import Budget, Pipeline, recipes
from gracekv.hf.capture import EVERYTHING, capture
from gracekv.testing.models import tiny_llama
from support.prompts import random_prompt

NAMES = [name for name in recipes.names() if not name.startswith("gracekv")]


@pytest.fixture(scope="module")
def setting():
    return tiny_llama(), random_prompt(160, (3, 150), 160, seed=2)


@pytest.mark.parametrize("name", NAMES)
def test_the_declared_capture_is_enough(setting, name):
    model, prompt = setting
    pipeline = Pipeline.named(name)
    lean, full = (
        pipeline.run(capture(model, prompt, needs), Budget.ratio(3))
        for needs in (pipeline.needs(), pipeline.needs() | EVERYTHING)
    )
    for a, b in zip(lean.cache.layers, full.cache.layers, strict=True):
        torch.testing.assert_close(a.tensors(), b.tensors(), rtol=0, atol=0)
