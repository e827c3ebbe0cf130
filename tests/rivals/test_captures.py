"""A rival captures only what it reads."""

import pytest

from gracekv import Budget, Pipeline, recipes
from gracekv.hf.capture import EVERYTHING, capture
from gracekv.testing.models import tiny_llama
from support.prompts import random_prompt
from support.same_results import assert_same_entries

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
    assert_same_entries(lean.cache, full.cache)
