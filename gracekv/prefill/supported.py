"""Which models can be captured and decoded: one list, one check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gracekv.distributed.sharding import check_sharding
from gracekv.errors import UnsupportedModelError
from gracekv.prefill.model_layers import kept_layers, layer_kinds, rope_parameters, text_config
from gracekv.prefill.needs import Needs
from gracekv.prefill.self_check import self_check

TESTED_MODEL_TYPES = frozenset(
    {
        "cohere2",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt_oss",
        "granite",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "smollm3",
        "starcoder2",
    }
)
"""`config.model_type`s whose capture and decoding are tested against the stock forward pass."""

TESTED_ROPE_TYPES = frozenset({"default", "dynamic", "linear", "llama3", "longrope", "yarn"})
"""Rotations that rotate_half of one table of cosines and sines describes. "dynamic" and "longrope"
also depend on the sequence's length: see `gracekv.prefill.length_limits`."""

KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers, as transformers names them, that a cache may hold."""

LINEAR_MODEL_TYPES = frozenset({"qwen3_next"})
"""`config.model_type`s whose layers of kind linear_attention a cache may hold, too."""


def check_model(model: Any) -> None:
    """Raise `UnsupportedModelError` if compressing this model's cache would break an assumption.

    Looks for weights sharded otherwise than by heads, encoders, layers of other kinds, missing or
    unknown RoPE and training mode. A family that is not tested is tried on a short random prompt:
    see `self_check`. `check_prompt_length` checks what depends on the length.
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
    kinds = layer_kinds(text_config(model))
    known = KINDS | ({"linear_attention"} if family in LINEAR_MODEL_TYPES else frozenset())
    for number, kind in enumerate(kinds):
        if kind not in known:
            raise UnsupportedModelError(
                f"Layer {number} of {name} ({family}) is of kind {kind}; gracekv compresses layers "
                f"of kind full_attention and leaves those of kind "
                f"{_listed(known - {'full_attention'})} as they are, and knows no others (of kind "
                f"linear_attention those of {_listed(LINEAR_MODEL_TYPES)} alone). Tested families: "
                f"{_listed(TESTED_MODEL_TYPES)}."
            )
    if "linear_attention" in kinds and "full_attention" not in kinds:
        raise UnsupportedModelError(
            f"{name} ({family}) has no layer of kind full_attention, so nothing of its cache grows "
            f"with the prompt and there is nothing to compress."
        )
    rope = rope_parameters(model)
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


def check_needs(model: Any, needs: Needs) -> None:
    """Raise `UnsupportedModelError` if the model cannot be run once more for `needs`."""
    kept = kept_layers(model)
    if kept and (needs.reconstruction or needs.draft):
        raise UnsupportedModelError(
            f"This recipe runs the model once more over the whole context, or drafts an answer. "
            f"Layer {kept[0].number} of {type(model).__name__} is of kind {kept[0].kind} and holds "
            f"no key and value of every token for it. Use a recipe that reads once, such as "
            f"'gracekv-plus'."
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
