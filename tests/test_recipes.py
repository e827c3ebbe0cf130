"""Named pipelines: plain data, the paper's recipe, the default, labels."""

import dataclasses

import pytest
import torch

import gracekv
from gracekv import Pipeline, Prompt, recipes
from gracekv.allocate import RecentWindow
from gracekv.backends import Eager
from gracekv.testing.models import tiny_llama


@pytest.mark.parametrize("recipe", recipes.names())
def test_recipes_are_described_and_label_their_pipelines(recipe: str) -> None:
    pipeline = Pipeline.named(recipe)
    assert recipes.describe(recipe)
    assert recipes.label(pipeline) == recipe


@pytest.mark.parametrize("recipe", recipes.names())
def test_recipes_compress_where_the_window_shrinks(recipe: str) -> None:
    prompt = Prompt.from_ids(torch.arange(2, 92), context=(4, 84), question_end=88)
    result = gracekv.compress(tiny_llama(), prompt, ratio=8, pipeline=recipe)
    assert result.generate_ids(2).shape == (1, 2)


def test_the_paper_and_the_default_are_named() -> None:
    assert Pipeline.from_dict({}) == Pipeline.named("gracekv")
    assert Pipeline.default() == Pipeline.named(recipes.DEFAULT) != Pipeline.named("gracekv")
    assert Pipeline.from_dict({"floor": "none"}, base="h2o") == Pipeline.named("h2o")
    with pytest.raises(TypeError, match="segment"):
        Pipeline()  # type: ignore[call-arg]


def test_the_papers_recipe_is_made_of_defaults() -> None:
    """Every strategy of the paper's recipe has its default fields, which are the paper's."""
    paper = Pipeline.named("gracekv")
    for field in dataclasses.fields(paper):
        strategy = getattr(paper, field.name)
        if not isinstance(strategy, bool):
            assert strategy == type(strategy)()


@pytest.mark.parametrize("name", [recipes.DEFAULT, "gracekv", "snapkv"])
def test_labels_mind_what_decides_which_entries_are_kept(name: str) -> None:
    pipeline = Pipeline.named(name)
    assert recipes.label(dataclasses.replace(pipeline, backend=Eager(), certify=True)) == name
    assert recipes.label(dataclasses.replace(pipeline, window=RecentWindow(size=7))) == "custom"


def test_a_broken_recipe_breaks_no_label(monkeypatch) -> None:
    broken = recipes.Recipe("Broken", "a plugin", {"value": "shrt_keys"})
    monkeypatch.setattr(recipes, "RECIPES", {"broken": broken, **recipes.RECIPES})
    mine = dataclasses.replace(Pipeline.named("snapkv"), window=RecentWindow(size=7))
    assert recipes.label(mine) == "custom"
