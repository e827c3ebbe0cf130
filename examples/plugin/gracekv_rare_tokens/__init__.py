"""Rare tokens first: a scorer and a recipe for gracekv."""

from gracekv import recipes
from gracekv_rare_tokens.rare_tokens import RareTokens

__all__ = ["RareTokens"]

recipes.register(
    "rare-tokens",
    recipes.Recipe(
        "SnapKV's selection with rare tokens in place of attended ones",
        "an example of a plugin",
        {**recipes.find("snapkv").pipeline, "value": "rare_tokens"},
    ),
)
