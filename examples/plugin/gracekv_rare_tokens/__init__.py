"""Two scorers for gracekv, one of which captures its own data, and a recipe."""

from gracekv import recipes
from gracekv_rare_tokens.rare_tokens import RareTokens
from gracekv_rare_tokens.turning_values import TurningValues

__all__ = ["RareTokens", "TurningValues"]

recipes.register(
    "rare-tokens",
    recipes.Recipe(
        "SnapKV's selection with rare tokens in place of attended ones",
        "an example of a plugin",
        {**recipes.find("snapkv").pipeline, "value": "rare_tokens"},
    ),
)
