"""A rival captures only what it reads."""

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
        torch.testing.assert_close(a.tensors(), b.tensors(), rtol=0, atol=0)
