"""Which models can be captured and decoded: one list, one check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from gracekv.distributed.sharding import check_sharding, is_sharded
from gracekv.errors import UnsupportedModelError
from gracekv.prefill.kept import WITH_STATES, WITHOUT_CACHE
from gracekv.prefill.model_layers import (
    COMPRESSED,
    has_rope,
    head_sizes,
    kept_layers,
    layer_kinds,
    rope_parameters,
    text_config,
)
from gracekv.prefill.needs import Needs
from gracekv.prefill.observations import check_observers
from gracekv.prefill.observer import Reading
from gracekv.prefill.self_check import self_check

TESTED_MODEL_TYPES = frozenset(
    {
        "cohere2",
        "falcon_h1",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm4",
        "gpt_oss",
        "granite",
        "granitemoehybrid",
        "lfm2",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "smollm3",
        "starcoder2",
    }
)
"""`config.model_type`s whose capture and decoding are tested against the stock forward pass."""

TESTED_ROPE_TYPES = frozenset(
    {"default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn"}
)
"""Rotations that rotate_half of one table of cosines and sines describes. "dynamic" and "longrope"
also depend on the sequence's length: see `gracekv.prefill.length_limits`."""

KINDS = frozenset(COMPRESSED) | {"sliding_attention"} | WITH_STATES | WITHOUT_CACHE
"""Kinds of layers, as transformers names them, that a cache may hold."""


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
    for number, kind in enumerate(kinds):
        if kind not in KINDS:
            raise UnsupportedModelError(
                f"Layer {number} of {name} ({family}) is of kind {kind}; gracekv compresses keys "
                f"and values of kinds {_listed(COMPRESSED)}, leaves layers of kinds "
                f"{_listed(KINDS - set(COMPRESSED))} as they are, and knows no others. Tested "
                f"families: {_listed(TESTED_MODEL_TYPES)}."
            )
    has_states = bool(WITH_STATES & set(kinds))
    if has_states and not set(COMPRESSED) & set(kinds):
        raise UnsupportedModelError(
            f"{name} ({family}) has no layer of kind full_attention, so nothing of its cache grows "
            f"with the prompt and there is nothing to compress."
        )
    # Of linear layers `check_sharding` sees that every process holds all states.
    divided = [x for x, kind in enumerate(kinds) if kind in WITH_STATES - {"linear_attention"}]
    if divided and is_sharded(model):
        number = divided[0]
        raise UnsupportedModelError(
            f"Layer {number} of {name} ({family}) is of kind {kinds[number]}, whose states are not "
            f"divided among processes. Load the model without tp_plan."
        )
    rope, rotates = rope_parameters(model), has_rope(model) or not has_states
    if rotates and not rope:
        raise UnsupportedModelError(
            f"{name} ({family}) has no rotary position embedding (RoPE), which merging keys "
            f"relies on, and no layers with states that would tell positions. Tested families: "
            f"{_listed(TESTED_MODEL_TYPES)}."
        )
    if not hasattr(model.get_decoder(), "layers"):
        raise UnsupportedModelError(
            f"{name} ({family}) does not have its decoder's layers in a list named layers. Tested "
            f"families: {_listed(TESTED_MODEL_TYPES)}."
        )
    if len(kinds) != len(model.get_decoder().layers):
        raise UnsupportedModelError(
            f"The config of {name} ({family}) describes {len(kinds)} layers, its decoder has "
            f"{len(model.get_decoder().layers)}; gracekv takes one attention a layer."
        )
    if rotates and rope["rope_type"] not in TESTED_ROPE_TYPES:
        raise UnsupportedModelError(
            f"The RoPE variant {rope['rope_type']!r} of {name} is not supported; supported: "
            f"{_listed(TESTED_ROPE_TYPES)}."
        )
    shared = getattr(text_config(model), "num_kv_shared_layers", None) or 0
    if shared:
        raise UnsupportedModelError(
            f"Layer {len(kinds) - shared} of {name} ({family}) attends to the keys and values of "
            f"an earlier layer; what several layers read is not compressed yet."
        )
    head_sizes(model)
    if model.training:
        raise UnsupportedModelError(
            "The model is in training mode, where dropout makes its cache random. Call "
            "model.eval() first."
        )
    if family not in TESTED_MODEL_TYPES:
        self_check(model)


def check_needs(model: Any, needs: Needs, *, passage: bool = False) -> None:
    """Raise `ObserverError` if the model, or a passage, cannot give what an observer reads."""
    kept = kept_layers(model)
    driver = "gracekv.capture"
    if passage:
        driver = "a passage, whose context is mostly gone,"
    elif kept:
        first = kept[0]
        driver = f"{type(model).__name__}, whose layer {first.number} ({first.kind}) does not "
        driver += "hold every token,"
    gives: frozenset[Reading] = frozenset(get_args(Reading))
    if passage or kept:
        gives -= {"passes"}
    advice = "Use a recipe that reads once, such as 'gracekv-plus' or 'gracekv-agnostic'."
    check_observers(needs.observers, gives, driver, advice)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
