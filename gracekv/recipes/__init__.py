"""Named pipelines as plain data, each given by its differences from the paper's method.

A recipe is a name, a summary, a source and the fields in which its pipeline differs from `PAPER`.
No recipe has code of its own. Plugins add theirs with `register`.
"""

from __future__ import annotations

from contextlib import suppress

from gracekv.errors import ConfigError, UnknownStrategyError, expect, suggestion
from gracekv.recipes.base import PAPER, Recipe
from gracekv.recipes.own import OWN
from gracekv.recipes.rivals import RIVALS
from gracekv.registry import Configurable
from gracekv.registry.plugins import load_plugins, missing_hint

__all__ = [
    "DEFAULT", "DEFAULT_WITHOUT_QUESTION", "PAPER", "Recipe", "default", "describe", "find",
    "label", "names", "register",
]  # fmt: skip

DEFAULT = "gracekv-plus"
"""The default of `gracekv.compress` and the command line for a known question and a budget in
entries; see `default` for the others. "gracekv" is the paper's method."""

DEFAULT_WITHOUT_QUESTION = "gracekv-agnostic"
"""The same for a prompt without a question, where questions come later."""

# kvpress names whose nearest match here would be another method; SnapKVPress is our snapkv.
_PRESSES = {"adakv": "ada-snapkv", "kvzip": "kvzip-two-pass", "observedattention": "h2o"}

RECIPES: dict[str, Recipe] = {**OWN, **RIVALS}


def default(*, question: bool = True, per_byte: bool = False) -> str:
    """The recipe that `compress` uses by default, for a prompt with or without a question.

    With `per_byte`, entries take 4, 8 or 16 bits per number, chosen by utility per byte.
    """
    name = DEFAULT if question else DEFAULT_WITHOUT_QUESTION
    return f"{name}-allocated" if per_byte else name


def names() -> list[str]:
    """All recipe names, in the order of the tables; those of plugins last."""
    load_plugins()
    return list(RECIPES)


def find(name: str) -> Recipe:
    """The recipe of that name, else `UnknownStrategyError` with the nearest name."""
    load_plugins()
    if name in RECIPES:
        return RECIPES[name]
    known, asked = {x: x for x in names()} | _PRESSES, str(name).removesuffix("Press")
    raise UnknownStrategyError(
        f"Unknown recipe {name!r}.{suggestion(asked, known)} Recipes: {', '.join(names())}. "
        f"For your own, use Pipeline.from_dict or recipes.register. {missing_hint()}"
    )


def register(name: str, recipe: Recipe) -> None:
    """Make `recipe` available under `name`, to `Pipeline.named` and on the command line.

    Registering an equal recipe again changes nothing. Raises `ConfigError` if another recipe has
    the name.
    """
    expect(recipe, Recipe, "register takes a gracekv.recipes.Recipe")
    if RECIPES.setdefault(name, recipe) != recipe:
        raise ConfigError(
            f"The recipe {name!r} is already registered: {RECIPES[name].summary!r}. Rename yours."
        )


def describe(name: str) -> str:
    """A recipe's summary and source in one line; raises `UnknownStrategyError` for other names."""
    recipe = find(name)
    return f"{recipe.summary} ({recipe.source})"


def label(pipeline: Configurable) -> str:
    """The name of the recipe whose pipeline this is, or "custom".

    Backend, certificate and pruning are ignored: they do not change which entries are kept.
    """
    ignored = {key: pipeline.to_dict()[key] for key in ("backend", "certify", "prune")}
    for name in names():
        with suppress(ConfigError):  # a recipe that is broken
            if type(pipeline).from_dict({**RECIPES[name].pipeline, **ignored}) == pipeline:
                return name
    return "custom"
