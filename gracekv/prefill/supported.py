"""Which models can be captured and decoded: one list, one check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gracekv.distributed.sharding import check_sharding
from gracekv.errors import UnsupportedModelError
from gracekv.prefill.model_layers import layer_kinds
from gracekv.prefill.self_check import self_check

TESTED_MODEL_TYPES = frozenset(
    {
        "gemma",
        "glm4",
        "granite",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
"""`config.model_type`s whose capture and decoding are tested against the stock forward pass."""

TESTED_ROPE_TYPES = frozenset({"default", "dynamic", "linear", "llama3", "longrope", "yarn"})
"""Rotations that rotate_half of one table of cosines and sines describes. "dynamic" and "longrope"
also depend on the sequence's length: see `gracekv.prefill.length_limits`."""


def check_model(model: Any) -> None:
    """Raise `UnsupportedModelError` if compressing this model's cache would break an assumption.

    Looks for weights sharded otherwise than by heads, encoders, layers of other kinds, capped
    attention logits, missing or unknown RoPE and training mode. A family that is not tested is
    tried on a short random prompt: see `self_check`. `check_prompt_length` checks what depends on
    the length.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise UnsupportedModelError(
            f"gracekv takes a transformers causal language model; got {type(model).__name__}."
        )
    family, name = getattr(config, "model_type", "unknown"), type(model).__name__
    check_sharding(model)
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        raise UnsupportedModelError(
            f"{name} ({family}) attends to an encoder's output as well, whose keys and values no "
            f"prompt makes. gracekv takes decoder-only models; tested families: "
            f"{_listed(TESTED_MODEL_TYPES)}."
        )
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and rope and all(isinstance(x, dict) for x in rope.values()):
        raise UnsupportedModelError(
            f"{name} ({family}) rotates its layers of kind {_listed(rope)} differently, and most "
            f"of them see a sliding window only, so their caches are bounded already. Use a model "
            f"with full attention in every layer; tested families: {_listed(TESTED_MODEL_TYPES)}."
        )
    for number, kind in enumerate(layer_kinds(config)):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"Layer {number} of {name} ({family}) is of kind {kind}, which keeps no key and "
                f"value of every token. Use a model with full attention in every layer."
            )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError(
            f"{name} ({family}) caps its attention logits at {config.attn_logit_softcapping}, "
            f"which attention over merged entries does not reproduce. Tested families: "
            f"{_listed(TESTED_MODEL_TYPES)}."
        )
    if not isinstance(rope, dict) or "rope_type" not in rope:
        raise UnsupportedModelError(
            f"{name} ({family}) has no rotary position embedding (RoPE), which merging keys "
            f"relies on. Tested families: {_listed(TESTED_MODEL_TYPES)}."
        )
    if not hasattr(model.get_decoder(), "layers"):
        raise UnsupportedModelError(
            f"{name} ({family}) does not have its decoder's layers in a list named layers. Tested "
            f"families: {_listed(TESTED_MODEL_TYPES)}."
        )
    if rope["rope_type"] not in TESTED_ROPE_TYPES or "mrope_section" in rope:
        raise UnsupportedModelError(
            f"The RoPE variant {rope['rope_type']!r} of {name} is not supported; supported: "
            f"{_listed(TESTED_ROPE_TYPES)}."
        )
    if model.training:
        raise UnsupportedModelError(
            "The model is in training mode, where dropout makes its cache random. Call "
            "model.eval() first."
        )
    if family not in TESTED_MODEL_TYPES:
        self_check(model)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
