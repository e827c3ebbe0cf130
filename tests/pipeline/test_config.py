"""Pipeline files."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from gracekv import Pipeline, recipes
from gracekv.errors import ConfigError, UnknownStrategyError
from gracekv.hf.compress import chosen_pipeline
from gracekv.pipeline.config import _without_none, load_pipeline, save_pipeline

FILES = {
    "p.yaml": "floor: none\nwindow: {size: 16}\n",
    "p.toml": 'floor = "none"\n[window]\nsize = 16\n',
    "p.json": '{"floor": "none", "window": {"size": 16}}',
}


@pytest.mark.parametrize("name", FILES)
def test_files_spell_the_same_pipeline(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    expected = Pipeline.from_dict({"floor": "none", "window": {"size": 16}})
    assert load_pipeline(path) == expected
    assert expected != Pipeline.named("gracekv")
    numbers = Pipeline.from_dict({"window": {"share": np.float64(0.5)}})
    save_pipeline(numbers, path)
    assert load_pipeline(path) == numbers


def test_none_is_left_out_of_strategies_in_lists() -> None:
    assert _without_none({"scorers": [{"name": "a", "size": None}]}) == {"scorers": [{"name": "a"}]}


@pytest.mark.parametrize("recipe", ["gracekv-plus", "streaming-llm", "h2o-half"])
def test_fields_of_a_window_are_the_recipe_s_where_they_are_left_out(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Pipeline.named(recipe).window
    got = Pipeline.from_dict({"window": {"share": 0.5}}, base=recipe)
    assert got.window == dataclasses.replace(window, share=0.5) != window
    own = recipes.Recipe("x", "ours", {"window": window})
    monkeypatch.setattr(recipes, "find", lambda name: own)
    assert Pipeline.from_dict({"window": {"share": 0.5}}, base="own").window == got.window


def test_a_file_may_start_from_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("base: snapkv\nvalue: key_norm\n")
    want = Pipeline.from_dict({"value": "key_norm"}, base="snapkv")
    assert load_pipeline(path) == chosen_pipeline(None, None, path, None, ()) == want


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".toml", ".json"])
@pytest.mark.parametrize("recipe", recipes.names())
def test_recipes_survive_a_file(tmp_path: Path, recipe: str, suffix: str) -> None:
    pipeline = Pipeline.named(recipe)
    save_pipeline(pipeline, tmp_path / f"p{suffix}")
    assert load_pipeline(tmp_path / f"p{suffix}") == pipeline
    assert load_pipeline(recipe) == pipeline


@pytest.mark.parametrize(
    ("name", "text"), [("p.yaml", "a: [1"), ("p.toml", "a = "), ("p.json", "{"), ("p.json", "[1]")]
)
def test_broken_files_are_refused(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_pipeline(path)


@pytest.mark.parametrize("tag", ["", "!!pairs", "itself"])
def test_aliases_of_aliases_are_refused(tmp_path: Path, tag: str) -> None:
    text, key = "[x: 1]" if tag else "[x]", "k: " if tag else ""
    for n in range(20):
        text = f"&a{n} {tag} [{key}{text}, {key}*a{n - 1}]" if n else f"&a0 {tag} {text}"
    if tag == "itself":
        text = f"&a [{', '.join(['*a'] * 500)}]"
    (tmp_path / "p.yaml").write_text(f"value: {text}")
    with pytest.raises(ConfigError, match="more than 100,000 values") as caught:
        load_pipeline(tmp_path / "p.yaml")
    assert len(str(caught.value)) < 500


def test_unknown_keys_and_names_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    for text, near in (("flor: none", "'floor'"), ("base: snapkw", r"'snapkv'\? Recipes: ")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"Did you mean {near}"):
            load_pipeline(path)
    with pytest.raises(UnknownStrategyError, match="Did you mean 'gracekv-no-floor'"):
        load_pipeline("gracekv-no-flor")
    with pytest.raises(ConfigError, match="Cannot read"):
        load_pipeline(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="end in one of"):
        save_pipeline(Pipeline.named("gracekv"), tmp_path / "p.ini")
