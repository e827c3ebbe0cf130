"""Named pipelines as plain data: what each changes from the paper's method.

A recipe is a name, a line, a source and the fields in which its pipeline differs from `PAPER`. No
recipe has code of its own. Plugins add theirs with `register`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gracekv.errors import ConfigError, UnknownStrategyError
from gracekv.plugins import load_plugins, missing_hint
from gracekv.registry import Configurable, suggestion

DEFAULT = "gracekv-plus"
"""What `gracekv.compress` and the command line use unless told: the recipe that keeps the most
answers. "gracekv" is the paper's method."""

DEFAULT_WITHOUT_QUESTION = "gracekv-agnostic"
"""The same for a prompt without a question, whose cache is asked later."""

PAPER: Mapping[str, Any] = {
    "segment": "curvature_dp",
    "value": "multi_hop",
    "sensitivity": "output_projection",
    "distortion": "prototype",
    "refine": "binary_extract",
    "prototype": {},
    "floor": "singleton",
    "quota": "global",
    "allocate": "greedy",
    "pack": "prototype",
    "window": {},
}
"""The paper's method, stage by stage; its strategies' defaults are the paper's numbers."""

# What all selections of single tokens share: each token is a slot that stays or goes.
_TOKENS: Mapping[str, Any] = {
    "segment": "tokens",
    "distortion": "unit",
    "refine": "leaf_only",
    "floor": "none",
    "pack": "evict",
}
# A published rival: nothing weighs its heads, and all shares together are the budget exactly.
_RIVAL: Mapping[str, Any] = {
    **_TOKENS,
    "sensitivity": "none",
    "quota": {"name": "per_head", "remainder": True},
}
# What an answer will read: what a second reading would look at, tempered by where the question
# points and by what the prompt looked at all along. Docs: quality.md.
_REPLAYED: Mapping[str, Any] = {
    "name": "mixture",
    "rule": "rms",
    "weights": [1.0, 0.5],
    "scorers": [
        "replay",
        {"name": "read_ahead", "question_probes": 0, "lookahead": 1, "power": 2.0},
    ],
}
# The mean over probes and the maximum, fifty to one.
_AHEAD: Mapping[str, Any] = {"name": "read_ahead", "max_weight": 1 / 51}
_POINTED: Mapping[str, Any] = {
    "name": "mixture",
    "rule": "sum",
    "weights": [2.0, 1.0],
    "scorers": [_AHEAD, "mean_attention"],
}
_READING: Mapping[str, Any] = {
    "name": "mixture",
    "rule": "geometric",
    "scorers": [_REPLAYED, _POINTED],
}
_FORESEEN: Mapping[str, Any] = {"name": "value_norm", "relative": 0.5, "scorer": _READING}
# One top-k over all heads by those scores; of recent tokens only the last few are always kept.
_CHOSEN: Mapping[str, Any] = {
    **_TOKENS,
    "value": _FORESEEN,
    "sensitivity": "none",
    "window": {"size": 4, "minimum": 4},
}
# What is kept makes up for what is gone.
_PLUS: Mapping[str, Any] = {**_CHOSEN, "fit": "values_and_mass"}
# Without a question all words of the context are as likely, and one query each may need them.
_AGNOSTIC: Mapping[str, Any] = {
    **_CHOSEN,
    "value": {
        "name": "value_norm",
        "relative": 0.5,
        "power": 0.5,
        "scorer": "block_replay",
    },
    "fit": {
        "name": "values_and_mass",
        "queries": {
            "replay": {"name": "replay", "uniform_weight": 1.0, "max_queries": 64}, "tail": 0,
        },
        "trust": 0.03,
        "trust_read": 0.1,
    },
}  # fmt: skip


def _by(scorer: object) -> dict[str, Any]:
    """gracekv-plus with another score under its value norms."""
    return {**_PLUS, "value": {**_FORESEEN, "scorer": scorer}}


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
    "gracekv-plus": Recipe(
        "One top-k over all heads by what the answer is foreseen to read; values fitted",
        "ours: replayed context queries, read-ahead and mean attention, times value norms",
        _PLUS,
    ),
    "gracekv-agnostic": Recipe(
        "One top-k over all heads by what a second reading would look at; values fitted",
        "ours: replayed context queries, all alike, times value norms; the question is not read",
        _AGNOSTIC,
    ),
    "gracekv-draft": Recipe(
        "gracekv-plus after a look at what 16 drafted answer tokens read",
        "ours: 16 decoding steps on the full cache come before compression",
        _by({"name": "mixture", "scorers": ["draft_attention", _READING]}),
    ),
    "gracekv-foresight": Recipe(
        "One top-k over all heads by what 64 tokens of FullKV's own answer read: a limit",
        "ours: not a method, since it generates the answer first; what selection could reach",
        {**_by({"name": "draft_attention", "max_tokens": 64}), "fit": "none"},
    ),
    "gracekv-plus-no-fit": Recipe(
        "gracekv-plus whose kept entries stay as they were",
        "ours: an ablation",
        _CHOSEN,
    ),
    "gracekv-plus-no-replay": Recipe(
        "gracekv-plus by read-ahead and mean attention alone",
        "ours: an ablation",
        _by(_POINTED),
    ),
    "gracekv-plus-only-replay": Recipe(
        "gracekv-plus by replayed queries and the prompt's tail alone",
        "ours: an ablation",
        _by(_REPLAYED),
    ),
    "gracekv-plus-no-read-ahead": Recipe(
        "gracekv-plus whose read-ahead only picks the queries that are replayed",
        "ours: an ablation",
        _by({"name": "mixture", "rule": "geometric", "scorers": [_REPLAYED, "mean_attention"]}),
    ),
    "gracekv-plus-no-mean-attention": Recipe(
        "gracekv-plus without what the prompt looked at all along",
        "ours: an ablation",
        _by({"name": "mixture", "rule": "geometric", "scorers": [_REPLAYED, _AHEAD]}),
    ),
    "gracekv-plus-no-norms": Recipe(
        "gracekv-plus by attention alone, whatever it brings",
        "ours: an ablation",
        {**_PLUS, "value": _READING},
    ),
    "gracekv-plus-trees": Recipe(
        "The scores of gracekv-plus under the paper's slots, trees, floor and auction",
        "ours: what merging adds to better scores, or costs",
        {"value": _FORESEEN},
    ),
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
    "global-eviction": Recipe(
        "GraceKV's scores and sensitivity, one top-k of tokens over all heads, nothing merged",
        "ours: what trees add is the difference to it",
        _TOKENS,
    ),
    # StreamingLLM's own rule for recent tokens takes the place of the shared window, of which one
    # token stays: the last one, which the rule always keeps.
    "streaming-llm": Recipe(
        "The prompt's first 4 tokens and the most recent ones",
        "Xiao et al. 2023, arXiv:2309.17453",
        {**_RIVAL, "value": "recency", "window": {"size": 1, "minimum": 1}},
    ),
    "h2o": Recipe(
        "Tokens by all the attention they received in the prompt",
        "Zhang et al. 2023, arXiv:2306.14048; once after prefill, shared recent window",
        {**_RIVAL, "value": "column_sums"},
    ),
    "h2o-half": Recipe(
        "H2O with half of every head's share for recent tokens",
        "Zhang et al. 2023, arXiv:2306.14048; the published split",
        {**_RIVAL, "value": "column_sums", "window": {"rule": "half"}},
    ),
    "snapkv": Recipe(
        "Tokens by max-pooled attention from the prompt's last 32",
        "Li et al. 2024, arXiv:2404.14469; benchmark setting",
        {**_RIVAL, "value": "window_attention"},
    ),
    "ada-snapkv": Recipe(
        "SnapKV whose heads compete for their layer's share, a fifth of it in equal parts",
        "Feng et al. 2024, arXiv:2407.11550; rule of the official code",
        {**_RIVAL, "value": "window_attention", "quota": "adaptive_heads"},
    ),
    "pyramidkv": Recipe(
        "SnapKV with shares that fall linearly with depth",
        "Cai et al. 2024, arXiv:2406.02069; beta 20, shared window",
        {**_RIVAL, "value": "window_attention", "quota": "pyramid"},
    ),
    "chunkkv": Recipe(
        "Whole chunks of 10 tokens by attention from the prompt's last 32, a layer's heads alike",
        "Liu et al. 2025, arXiv:2502.00299; the budget spent to the last entry",
        {**_RIVAL, "value": "chunk_order"},
    ),
    "cam": Recipe(
        "H2O whose dropped values flow, by chance, into the 32 tokens after them",
        "Zhang et al. 2024, CaM, ICML; replayed once after prefill, the paper's denominator",
        {**_RIVAL, "value": "column_sums", "pack": "cam"},
    ),
    "d2o": Recipe(
        "H2O with layer shares by attention density; dropped tokens merge by key similarity",
        "Wan et al. 2024, arXiv:2406.13035; once after prefill, no layer exempt",
        {**_RIVAL, "value": "column_sums", "quota": "density", "pack": "d2o"},
    ),
    "expected-attention": Recipe(
        "Tokens by the attention that unknown future queries are expected to pay them",
        "Devoto et al. 2025, arXiv:2510.00636; the question is not read",
        {**_RIVAL, "value": "expected_attention"},
    ),
    "kvzip-two-pass": Recipe(
        "One top-k over all heads by attention received while the model repeats the context",
        "Kim et al. 2025, arXiv:2505.23416; runs the model a second time, the question is not read",
        {**_RIVAL, "value": "kvzip_two_pass", "quota": "global"},
    ),
    "scissorhands": Recipe(
        "Tokens by how many of the last 400 queries pay them at least uniform attention",
        "Liu et al. 2023, arXiv:2305.17118; once after prefill, equal shares",
        {**_RIVAL, "value": "scissorhands"},
    ),
}


def names() -> list[str]:
    """All recipe names, in the order of the tables; those of plugins last."""
    load_plugins()
    return list(RECIPES)


def find(name: str) -> Recipe:
    """The recipe of that name; `UnknownStrategyError` with the nearest name if there is none."""
    known = names()
    if name not in known:
        raise UnknownStrategyError(
            f"Unknown recipe {name!r}.{suggestion(str(name), known)} Recipes: {', '.join(known)}. "
            f"For one of your own use Pipeline.from_dict or recipes.register. {missing_hint()}"
        )
    return RECIPES[name]


def register(name: str, recipe: Recipe) -> None:
    """Make `recipe` available under `name`, to `Pipeline.named` and on the command line.

    Registering an equal recipe again changes nothing. Raises `ConfigError` if another recipe has
    the name.
    """
    if RECIPES.setdefault(name, recipe) != recipe:
        raise ConfigError(
            f"The recipe {name!r} is already registered ({RECIPES[name].summary!r}). Choose "
            f"another name."
        )


def describe(name: str) -> str:
    """One line: what the recipe is and where it comes from; else `UnknownStrategyError`."""
    recipe = find(name)
    return f"{recipe.summary} ({recipe.source})"


def label(pipeline: Configurable) -> str:
    """The name of the recipe whose pipeline this is, or "custom".

    Backend, certificate and pruning are ignored: they do not change which entries are kept.
    """
    ignored = {key: pipeline.to_dict()[key] for key in ("backend", "certify", "prune")}
    for name in names():
        if type(pipeline).from_dict({**RECIPES[name].pipeline, **ignored}) == pipeline:
            return name
    return "custom"
