"""Which models can be captured and decoded: one list, one check."""

from __future__ import annotations

from typing import Any

from gracekv.errors import UnsupportedModelError

TESTED_MODEL_TYPES = frozenset({"llama"})
"""`config.model_type`s whose capture and decoding are tested against the stock forward pass."""

TESTED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotations that depend on a token's position alone. "dynamic" and "longrope" change with the
sequence's length, so cached keys and later ones would not fit together."""

BASE_ATTENTION = ("sdpa", "eager")
"""Attention implementations of transformers that ours can stand in for."""


def check_model(model: Any) -> None:
    """Raise `UnsupportedModelError` if compressing this model's cache would break an assumption.

    Looks for sliding windows, missing or length-dependent RoPE, an untested family and training
    mode, in this order: the first two are what breaks, the third what nobody has tried.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise UnsupportedModelError(
            f"gracekv takes a transformers causal language model; got {type(model).__name__}."
        )
    family = getattr(config, "model_type", "unknown")
    sliding = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or (sliding and getattr(config, "use_sliding_window", True)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers that do not attend to the whole sequence "
            f"({', '.join(sorted(kinds)) or f'sliding window of {sliding}'}); their caches are "
            f"bounded already. Use a model with full attention in every layer."
        )
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        raise UnsupportedModelError(
            f"{type(model).__name__} ({family}) has no rotary position embedding (RoPE), which "
            f"merging keys relies on. Supported families: {_listed(TESTED_MODEL_TYPES)}."
        )
    if rope["rope_type"] not in TESTED_ROPE_TYPES or "mrope_section" in rope:
        raise UnsupportedModelError(
            f"The RoPE variant {rope['rope_type']!r} of {type(model).__name__} is not supported; "
            f"supported: {_listed(TESTED_ROPE_TYPES)}."
        )
    if family not in TESTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"The model family {family!r} is not tested with gracekv; tested: "
            f"{_listed(TESTED_MODEL_TYPES)}."
        )
    if model.training:
        raise UnsupportedModelError(
            "The model is in training mode, where dropout makes its cache random. Call "
            "model.eval() first."
        )


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
