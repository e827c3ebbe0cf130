"""Published methods as recipes of the same stages, at the exact budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gracekv.recipes.base import TOKENS, Recipe

# A published method: heads are not weighted, and shares add up to the budget exactly.
_PER_HEAD = {"name": "per_head", "remainder": True}
_RIVAL: Mapping[str, Any] = {**TOKENS, "sensitivity": "none", "quota": _PER_HEAD}
# Without a recent window: only the last token is always kept.
_LAST: Mapping[str, Any] = {**_RIVAL, "window": {"size": 1, "minimum": 1}}
_GUARDED = {**_RIVAL, "quota": {"name": "adaptive_heads", "rule": "safeguard"}}
_MEAN_POOLED = {"name": "window_attention", "pooling": "avg", "kernel": 5}
_WITHOUT_NORMS = {"name": "expected_attention", "value_norm": False}
RIVALS: Mapping[str, Recipe] = {
    # StreamingLLM has its own rule for recent tokens, so the shared window shrinks to one token:
    # the last, which the rule always keeps.
    "streaming-llm": Recipe(
        "The prompt's first 4 tokens and the most recent ones",
        "Xiao et al. 2023, arXiv:2309.17453",
        {**_LAST, "value": "recency"},
    ),
    "h2o": Recipe(
        "Tokens by all the attention they received in the prompt",
        "Zhang et al. 2023, arXiv:2306.14048; once after prefill, shared recent window",
        {**_RIVAL, "value": "column_sums"},
    ),
    "h2o-half": Recipe(
        "H2O with half of each head's share for recent tokens",
        "Zhang et al. 2023, arXiv:2306.14048; the published split",
        {**_RIVAL, "value": "column_sums", "window": {"rule": "half"}},
    ),
    "snapkv": Recipe(
        "Tokens by max-pooled attention from the prompt's last 32",
        "Li et al. 2024, arXiv:2404.14469; benchmark setting",
        {**_RIVAL, "value": "window_attention"},
    ),
    "snapkv-4bit": Recipe(
        "SnapKV with 4 bits per number",
        "Li et al. 2024, arXiv:2404.14469; rounding: Liu et al. 2024, KIVI, arXiv:2402.02750",
        {**_RIVAL, "value": "window_attention", "precision": {"name": "uniform", "bits": 4}},
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
        "Liu et al. 2025, arXiv:2502.00299; the budget is spent to the last entry",
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
        "Devoto et al. 2025, arXiv:2510.00636; as its authors run it, the question is not read",
        {**_GUARDED, "value": {"name": "expected_attention", "epsilon": 1e-2}},
    ),
    "kvzip-two-pass": Recipe(
        "One top-k over all heads by attention received while the model repeats the context",
        "Kim et al. 2025, arXiv:2505.23416; runs the model a second time, the question is not read",
        {**_LAST, "value": "kvzip_two_pass", "quota": "global"},
    ),
    "attention-matching": Recipe(
        "Tokens by what a repetition attends to; multiplicities and values by least squares",
        "Zweiger et al. 2026, arXiv:2602.16284; equal shares, no self-study; a second pass",
        {**_LAST, "value": "repeated_attention", "fit": "least_squares"},
    ),
    "attention-matching-omp": Recipe(
        "Attention Matching with tokens by orthogonal matching pursuit, its best and slowest",
        "Zweiger et al. 2026, arXiv:2602.16284; as attention-matching",
        {
            **_LAST,
            "value": "matching_pursuit",
            # Multiplicities between 1e-12 and e^7, clipped once.
            "fit": {"name": "least_squares", "least": 1e-12, "most": math.exp(7), "steps": 0},
        },
    ),
    "grkv": Recipe(
        "CriticalKV's tokens in equal shares; values and keys by regression",
        "Peng et al. 2026, arXiv:2605.31105; shared recent window",
        {**_GUARDED, "value": {"name": "critical", "scorer": _MEAN_POOLED}, "fit": "regression"},
    ),
    "rdkv": Recipe(
        "Tokens at 0, 2, 4, 8 or 16 bits by mean-pooled attention from the prompt's last 32",
        "Zhang et al. 2026, RDKV, arXiv:2605.08317; keys take their token's bits, no streaming",
        {**_LAST, "value": _MEAN_POOLED, "precision": "rate_distortion"},
    ),
    "scissorhands": Recipe(
        "Tokens by how many of the last 400 queries pay them at least uniform attention",
        "Liu et al. 2023, arXiv:2305.17118; once after prefill, equal shares",
        {**_RIVAL, "value": "scissorhands"},
    ),
    "knorm": Recipe(
        "Tokens whose keys have the smallest norm",
        "Devoto et al. 2024, arXiv:2406.11430; the question is not read",
        {**_RIVAL, "value": "key_norm"},
    ),
    "keydiff": Recipe(
        "Tokens whose keys are least like the mean key",
        "Park et al. 2025, arXiv:2504.15364; once after prefill, the question is not read",
        {**_RIVAL, "value": "key_difference"},
    ),
    "lagkv": Recipe(
        "The least alike tokens of each chunk of 128, scaled by the next chunk",
        "Liang et al. 2025, arXiv:2504.04704; once after prefill, the question is not read",
        {**_RIVAL, "value": "lag_relative"},
    ),
    "compactor": Recipe(
        "Tokens by leverage of their keys and attention inside chunks of 256, without a mask",
        "Chari & Van Durme 2025, arXiv:2507.08143; exact leverage, the question is not read",
        {**_RIVAL, "value": "compactor", "quota": {"name": "adaptive_heads", "floor": 0.0}},
    ),
    "tova": Recipe(
        "Tokens by attention from the prompt's last position, a layer's heads alike",
        "Oren et al. 2024, arXiv:2401.06104; once after prefill, shared recent window",
        {**_RIVAL, "value": "last_query"},
    ),
    "critical-snapkv": Recipe(
        "SnapKV's first half, then its scores times what values write to the residual stream",
        "Feng et al. 2025, arXiv:2502.03805; equal shares, shared recent window",
        {**_RIVAL, "value": "critical"},
    ),
    "defensivekv": Recipe(
        "Tokens by the largest attention from the prompt's last 32; a layer's heads compete",
        "Feng et al. 2025, arXiv:2510.13334; shared recent window",
        {**_RIVAL, "value": "defensive", "quota": {"name": "adaptive_heads", "floor": 0.0}},
    ),
    "layer-defensivekv": Recipe(
        "DefensiveKV with one top-k over all layers",
        "Feng et al. 2025, arXiv:2510.13334; shared recent window",
        {**_RIVAL, "value": "defensive", "quota": "global"},
    ),
    "critical-expected-attention": Recipe(
        "CriticalKV's two halves by expected attention without its value norms",
        "Feng et al. 2025, arXiv:2502.03805; as in kvpress, the question is not read",
        {**_RIVAL, "value": {"name": "critical", "scorer": _WITHOUT_NORMS}},
    ),
}
