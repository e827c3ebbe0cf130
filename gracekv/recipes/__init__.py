"""Named pipelines as plain data: what each changes from the paper's method.

A recipe is a name, a line, a source and the fields in which its pipeline differs from the default
`Pipeline()`. No recipe has code of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gracekv.errors import UnknownStrategyError


@dataclass(frozen=True, slots=True)
class Recipe:
    """One named pipeline.

    Attributes:
        summary: what it is, in a line.
        source: where it comes from.
        pipeline: fields for `Pipeline.from_dict`.
    """

    summary: str
    source: str
    pipeline: Mapping[str, Any] = field(default_factory=dict)


RECIPES: dict[str, Recipe] = {
    "gracekv": Recipe("The paper's method, to the letter", "paper, Method"),
    "fullkv": Recipe("Nothing removed, whatever the budget", "paper, FullKV", {"keep_all": True}),
    "gracekv-no-multihop": Recipe(
        "Direct relevance only, no hops along attention",
        "paper, ablation w/o MH",
        {"value": {"name": "multi_hop", "hops": 0}},
    ),
    "gracekv-no-floor": Recipe(
        "No exact singletons before the auction",
        "paper, ablation w/o SF (alpha = 0)",
        {"floor": "none"},
    ),
    "gracekv-no-curvature": Recipe(
        "Uniform slots of 64 tokens and midpoint cuts; extraction stays",
        "paper, ablation w/o CS",
        {
            "segment": "uniform",
            "refine": {"name": "binary_extract", "candidates": 0, "reward": 0.0},
        },
    ),
    "gracekv-no-multiresolution": Recipe(
        "One prototype a slot or all its tokens, nothing between",
        "paper, ablation w/o MR; its trees: ours",
        {"refine": "two_level"},
    ),
    "gracekv-no-global": Recipe(
        "Every head gets the same share of the budget",
        "paper, ablation w/o GA",
        {"quota": "per_head"},
    ),
}


def names() -> list[str]:
    """All recipe names, in the order of the tables."""
    return list(RECIPES)


def describe(name: str) -> str:
    """One line: what the recipe is and where it comes from."""
    if name not in RECIPES:
        raise UnknownStrategyError(f"Unknown recipe {name!r}. Recipes: {', '.join(names())}.")
    recipe = RECIPES[name]
    return f"{recipe.summary} ({recipe.source})"
