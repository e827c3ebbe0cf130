"""The paper's method, its ablations, and our recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gracekv.recipes.base import TOKENS, Recipe


def _both(*scorers: object) -> dict[str, Any]:
    """A geometric mean: a token needs all of these scores."""
    return {"name": "mixture", "rule": "geometric", "scorers": list(scorers)}


def _fit_of(queries: int, **more: object) -> dict[str, Any]:
    """A fit without a question: all context queries count alike; scores say how close values stay.

    `more`: further fields of the `ReferenceQueries`.
    """
    replay = {"name": "replay", "uniform_weight": 1.0, "max_queries": queries}
    held = {"trust": 0.03, "trust_read": 0.3, "by_score": True}
    return {"name": "values_and_mass", "queries": {"replay": replay, "tail": 0, **more}, **held}


# Three estimates of what the answer will attend to; docs/quality.md measures each.
# 1. The queries of the context and of the prompt's last tokens, replayed at the prompt's end.
_REPLAYED: Mapping[str, Any] = {
    "name": "mixture",
    "rule": "rms",
    "weights": [1.0, 0.5],
    "scorers": [
        {"name": "replay", "power": 2.0, "mean_power": 3.0, "context_share": 0.4},
        {"name": "read_ahead", "question_probes": 0, "lookahead": 1, "power": 2.0},
    ],
}
# 2. The question's attention, spread to the tokens after the attended ones. The mean over its
# queries counts fifty times as much as the maximum.
_AHEAD: Mapping[str, Any] = {"name": "read_ahead", "max_weight": 1 / 51}
# 3. The attention of the whole prompt, half as much as the second.
_POINTED: Mapping[str, Any] = {
    "name": "mixture",
    "rule": "sum",
    "weights": [2.0, 1.0],
    "scorers": [_AHEAD, "mean_attention"],
}
# A token needs both: the first estimate, and the other two.
_READING: Mapping[str, Any] = _both(_REPLAYED, _POINTED)
_FORESEEN: Mapping[str, Any] = {"name": "value_norm", "relative": 0.5, "scorer": _READING}
# One top-k over all heads by those scores; only the last four tokens are kept in any case.
_CHOSEN: Mapping[str, Any] = {
    **TOKENS,
    "value": _FORESEEN,
    "sensitivity": "none",
    "window": {"size": 4, "minimum": 4},
}
_PLUS: Mapping[str, Any] = {**_CHOSEN, "fit": "values_and_mass"}
# Exact tokens are expensive where others take 4 bits, so the window is half as long.
_ALLOCATED: Mapping[str, Any] = {"window": {"size": 2, "minimum": 2}, "precision": "allocated"}
# Without a question, any query of the context may come again, so all of them count alike; induction
# heads would read every token.
_COPIED: Mapping[str, Any] = {"name": "block_replay", "induction": 0.05}
_AGNOSTIC: Mapping[str, Any] = {
    **_CHOSEN,
    "value": {"name": "value_norm", "relative": 0.5, "power": 0.8, "scorer": _COPIED},
    "fit": _fit_of(64),
}
# The attention of a second pass, combined with the estimate of the first, whose weight is three
# times as large. A token needs both, or heads that repeat every token alike would take the whole
# budget; next come the tokens that only the second pass attends to, such as identifiers. Norms
# count less than in one pass, since they hurt prose.
_SECOND: Mapping[str, Any] = {"name": "kvzip_two_pass", "mean_power": 3.0}
_TWO_PASS: Mapping[str, Any] = {
    **_AGNOSTIC,
    "value": {
        **_AGNOSTIC["value"],
        "power": 0.5,
        "scorer": {
            "name": "mixture",
            "rule": "rms",
            "weights": [0.95, 0.05],
            "scorers": [{**_both("block_replay", _SECOND), "weights": [3.0, 1.0]}, _SECOND],
        },
    },
    # Fitted to the queries that the context would ask again and to those of the second pass.
    "fit": _fit_of(192, repeat=192, repeat_share=0.5, repeat_chunk=2048),
}
# If every head has equally many entries, tensors of a static shape hold keys and values and nothing
# else: no multiplicities, so only the values are fitted.
_EQUAL_FIT: Mapping[str, Any] = {**_AGNOSTIC["fit"], "name": "values"}


def _by(scorer: object) -> dict[str, Any]:
    """gracekv-plus with another score weighted by its value norms."""
    return {**_PLUS, "value": {**_FORESEEN, "scorer": scorer}}


def _ablated(summary: str, pipeline: Mapping[str, Any]) -> Recipe:
    return Recipe(summary, "ours: an ablation", pipeline)


def _without(summary: str, label: str, pipeline: Mapping[str, Any]) -> Recipe:
    return Recipe(summary, f"paper, ablation {label}", pipeline)


def _allocated(name: str, pipeline: Mapping[str, Any]) -> dict[str, Recipe]:
    """The recipe `name` with entries of several widths."""
    summary = f"{name} with 4, 8 or all bits per number in each entry, by utility per byte"
    source = "ours; rounding: Liu et al. 2024, KIVI, arXiv:2402.02750"
    return {f"{name}-allocated": Recipe(summary, source, {**pipeline, **_ALLOCATED})}


OWN: Mapping[str, Recipe] = {
    "gracekv": Recipe("The paper's method exactly as published", "paper, Method"),
    "gracekv-plus": Recipe(
        "One top-k over all heads by what the answer is expected to attend to; fitted values",
        "ours: replayed context queries, read-ahead and mean attention, times value norms",
        _PLUS,
    ),
    "gracekv-agnostic": Recipe(
        "One top-k over all heads by what replayed context queries attend to; fitted values",
        "ours: replayed context queries, equal weights, times value norms; question not read",
        _AGNOSTIC,
    ),
    "gracekv-plus-equal": Recipe(
        "gracekv-plus with equally many entries in every head, for tensors of one static shape",
        "ours: equal shares, no multiplicities",
        {**_PLUS, "quota": "per_head", "fit": "values"},
    ),
    "gracekv-agnostic-equal": Recipe(
        "gracekv-agnostic with equally many entries in every head, for tensors of one static shape",
        "ours: equal shares, no multiplicities",
        {**_AGNOSTIC, "quota": "per_head", "fit": _EQUAL_FIT},
    ),
    **_allocated("gracekv-plus", _PLUS),
    **_allocated("gracekv-agnostic", _AGNOSTIC),
    "gracekv-agnostic-two-pass": Recipe(
        "gracekv-agnostic that also reads the context a second time, for lookups in it",
        "ours; second pass: Kim et al. 2025, KVzip, arXiv:2505.23416; the question is not read",
        _TWO_PASS,
    ),
    **_allocated("gracekv-agnostic-two-pass", _TWO_PASS),
    "gracekv-draft": Recipe(
        "gracekv-plus that also uses the attention of 16 drafted answer tokens",
        "ours: 16 decoding steps on the full cache come before compression",
        _by({"name": "mixture", "scorers": ["draft_attention", _READING]}),
    ),
    "gracekv-foresight": Recipe(
        "One top-k over all heads by the attention of 64 tokens of FullKV's own answer: a limit",
        "ours: not a method, since it generates the answer first; what selection could reach",
        {**_by({"name": "draft_attention", "max_tokens": 64}), "fit": "none"},
    ),
    "gracekv-plus-no-fit": _ablated("gracekv-plus without the fit of kept entries", _CHOSEN),
    "gracekv-plus-no-replay": _ablated(
        "gracekv-plus by read-ahead and mean attention alone", _by(_POINTED)
    ),
    "gracekv-plus-only-replay": _ablated(
        "gracekv-plus by replayed queries and the prompt's tail alone", _by(_REPLAYED)
    ),
    "gracekv-plus-no-read-ahead": _ablated(
        "gracekv-plus whose read-ahead only picks the queries that are replayed",
        _by(_both(_REPLAYED, "mean_attention")),
    ),
    "gracekv-plus-no-mean-attention": _ablated(
        "gracekv-plus without the mean attention of the prompt", _by(_both(_REPLAYED, _AHEAD))
    ),
    "gracekv-plus-no-norms": _ablated(
        "gracekv-plus without value norms", {**_PLUS, "value": _READING}
    ),
    "gracekv-plus-trees": Recipe(
        "The scores of gracekv-plus under the paper's slots, trees, floor and auction",
        "ours: what merging adds to better scores, or costs",
        {"value": _FORESEEN},
    ),
    "fullkv": Recipe("Nothing removed, whatever the budget", "paper, FullKV", {"keep_all": True}),
    **{
        f"fullkv-{bits}bit": Recipe(
            f"Nothing removed; {bits} bits per number except in prefix, window, question and sinks",
            "Liu et al. 2024, KIVI, arXiv:2402.02750, its groups; the window is ours",
            {"keep_all": True, "precision": {"name": "uniform", "bits": bits}},
        )
        for bits in (8, 4)
    },
    "gracekv-no-multihop": _without(
        "Direct relevance only, no hops along attention",
        "w/o MH",
        {"value": {"name": "multi_hop", "hops": 0}},
    ),
    "gracekv-no-floor": _without(
        "No exact singletons before the auction", "w/o SF (alpha = 0)", {"floor": "none"}
    ),
    "gracekv-no-curvature": _without(
        "Uniform slots of 64 tokens and midpoint cuts; extraction stays",
        "w/o CS",
        {"segment": "uniform", "refine": {"name": "binary_extract", "candidates": 0, "reward": 0}},
    ),
    "gracekv-no-multiresolution": _without(
        "One prototype per slot or all its tokens, nothing in between",
        "w/o MR; its trees: ours",
        {"refine": "two_level"},
    ),
    "gracekv-no-global": _without(
        "Every head gets the same share of the budget", "w/o GA", {"quota": "per_head"}
    ),
    "global-eviction": Recipe(
        "GraceKV's scores and sensitivity; one top-k of tokens over all heads, nothing merged",
        "ours: shows what trees add",
        TOKENS,
    ),
}
