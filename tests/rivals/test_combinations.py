"""Any score works with any allocation and any representation, published together or not."""

import dataclasses

import pytest
import torch

from gracekv import Budget, Pipeline, recipes
from gracekv.testing import synthetic_prefill
from support.selections import check_selection


def changed(recipe, **fields):
    return Pipeline.from_dict({**recipes.RECIPES[recipe].pipeline, **fields})


@pytest.mark.parametrize("options", [{"pooling": "avg", "kernel": 5}, {"window": 8}])
def test_the_familys_options_reach_every_member(options):
    value = {"name": "window_attention", **options}
    prefill = synthetic_prefill(context=200, layers=2, seed=8)
    for recipe in ("snapkv", "ada-snapkv", "pyramidkv", "chunkkv"):
        inner = {"name": "chunk_order", "scorer": value} if recipe == "chunkkv" else value
        run = changed(recipe, value=inner).run(prefill, Budget.ratio(5))
        check_selection(run, prefill, recent=32)
        default = Pipeline.named(recipe).run(prefill, Budget.ratio(5))
        assert not torch.equal(run.relevance.scores, default.relevance.scores)


def test_a_comparison_sets_one_window_for_all():
    # 16 bits per number, the unit of quantised recipes' budgets.
    prefill = synthetic_prefill(context=120, dtype=torch.bfloat16)
    for recipe in recipes.names():
        pipeline = Pipeline.named(recipe)
        window = dataclasses.replace(pipeline.window, share=0.5)
        run = dataclasses.replace(pipeline, window=window).run(prefill, Budget.ratio(6))
        # 20 entries per head. The exceptions have their own rules, see the recipes.
        own = recipe != "gracekv-plus-trees" and recipe.startswith(
            ("gracekv-plus", "gracekv-agnostic", "gracekv-draft", "gracekv-foresight")
        )
        one = recipe.startswith(("attention-matching", "kvzip", "rdkv", "streaming-llm"))
        expected = 1 if one else 4 if own else 10
        if recipe.endswith("-allocated"):
            expected = 2
        assert run.accounting.recent == expected
