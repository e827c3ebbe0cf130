"""Checks that a model is supported."""

from __future__ import annotations

from typing import Any, get_args

import torch

from gracekv.distributed.sharding import check_sharding, is_sharded
from gracekv.errors import UnsupportedModelError
from gracekv.prefill.layer_state import WITH_STATES, WITHOUT_CACHE
from gracekv.prefill.model_layers import (
    COMPRESSED,
    attention_module,
    has_rope,
    head_sizes,
    layer_kinds,
    other_layers,
    rope_parameters,
    text_config,
)
from gracekv.prefill.needs import Needs
from gracekv.prefill.observations import check_observers
from gracekv.prefill.observer import Source
from gracekv.prefill.self_check import self_check

TESTED_MODEL_TYPES = frozenset((
    "cohere2", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm4", "gpt_oss",
    "granite", "granitemoehybrid", "lfm2", "llama", "ministral", "mistral", "mixtral", "nemotron_h",
    "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next",
    "smollm3", "starcoder2",
))  # fmt: skip
"""`config.model_type`s whose capture and decoding are tested against the stock forward pass."""

TESTED_ROPE_TYPES = frozenset(
    {"default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn"}
)
"""RoPE types that rotate_half with one table of cosines and sines describes. "dynamic" and
"longrope" also depend on the sequence's length: see `length_limits`."""

_TESTED = f"Tested families: {', '.join(sorted(TESTED_MODEL_TYPES))}."

KINDS = frozenset(COMPRESSED) | {"sliding_attention"} | WITH_STATES | WITHOUT_CACHE
"""Kinds of layers, as transformers names them, that a cache may hold."""


def check_decoder(model: Any) -> None:
    """Raise `UnsupportedModelError` unless `model` is a causal language model of transformers."""
    known = getattr(model, "config", None) is not None and hasattr(model, "get_decoder")
    if not known or getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise UnsupportedModelError(
            f"gracekv takes a causal language model of transformers, as AutoModelForCausalLM loads "
            f"it; got {type(model).__name__}."
        )


def check_model(model: Any) -> None:
    """Raise `UnsupportedModelError` if this model breaks an assumption of compression.

    Checks for weights sharded other than by heads, encoders, other kinds of layers, missing or
    unknown RoPE and training mode. `self_check` covers untested families and attention modules that
    are not transformers' own.
    """
    check_decoder(model)
    check_sharding(model)
    _check_layers(model)
    head_sizes(model)
    if model.device.type not in ("cpu", "cuda"):
        try:
            torch.zeros(1, dtype=torch.float64, device=model.device)
        except (TypeError, RuntimeError) as error:
            raise UnsupportedModelError(
                f"The model is on {model.device}, which lacks the float64 needed to compute scores "
                f"(Apple's GPUs do, and some of Intel's). Move it to the CPU: model.to('cpu')."
            ) from error
    drops = (x for x in model.modules() if isinstance(x, torch.nn.Dropout) and x.p)
    if model.training or any(x.training for x in drops):
        raise UnsupportedModelError(
            "The model or one of its dropout layers is in training mode, where dropout makes its "
            "cache random. Call model.eval() first."
        )
    modules = map(attention_module, model.get_decoder().layers)
    kinds = {type(getattr(x, "_orig_mod", x)).__module__ for x in modules if x is not None}
    own = not all(x.startswith("transformers.models.") for x in kinds)
    if own or model.config.model_type not in TESTED_MODEL_TYPES:
        self_check(model)


def _check_layers(model: Any) -> None:
    """Raise `UnsupportedModelError` if the layers of `model` cannot be compressed."""
    config, kinds = model.config, layer_kinds(text_config(model))
    name = f"{type(model).__name__} ({getattr(config, 'model_type', 'unknown')})"
    if any(getattr(config, x, False) for x in ("is_encoder_decoder", "add_cross_attention")):
        raise UnsupportedModelError(
            f"{name} also attends to an encoder's output, whose keys and values do not come from a "
            f"prompt; gracekv takes decoder-only models. {_TESTED}"
        )
    _check_adapters(model, name)
    for number, kind in enumerate(kinds):
        if kind not in KINDS:
            raise UnsupportedModelError(
                f"Layer {number} of {name} is of kind {kind}. gracekv compresses layers of kind "
                f"{', '.join(COMPRESSED)}, keeps {', '.join(sorted(KINDS - set(COMPRESSED)))} as "
                f"they are, and supports no other kind. {_TESTED}"
            )
        # `check_sharding` ensures that every process holds all states of linear layers.
        if kind in WITH_STATES - {"linear_attention"} and is_sharded(model):
            raise UnsupportedModelError(
                f"Layer {number} of {name} is of kind {kind}, whose states are not divided among "
                f"processes. Load the model without tp_plan."
            )
    if config.model_type == "jamba":  # in 16 bits, rounding hides the problem from the self-check
        raise UnsupportedModelError(
            f"The states of {name} start anew with several tokens in transformers, so a question "
            f"or a passage would forget the text before it. {_TESTED}"
        )
    has_states = bool(WITH_STATES & set(kinds))
    if has_states and not set(COMPRESSED) & set(kinds):
        raise UnsupportedModelError(
            f"{name} has no layer of kind full_attention, so its cache does not grow with the "
            f"prompt, and there is nothing to compress."
        )
    rope = rope_parameters(model).get("rope_type")
    if not (rope in TESTED_ROPE_TYPES if has_rope(model) else has_states):
        raise UnsupportedModelError(
            f"The RoPE variant {rope!r} of {name} is not supported; supported: "
            f"{', '.join(sorted(TESTED_ROPE_TYPES))}, by a rotary module of the decoder. Merging "
            f"keys relies on one, or on layers with states that encode positions."
        )
    count = len(getattr(model.get_decoder(), "layers", ()))
    if len(kinds) != count:
        raise UnsupportedModelError(
            f"The config of {name} describes {len(kinds)} layers, its decoder has {count} in a "
            f"list named layers; gracekv takes one attention per layer. {_TESTED}"
        )
    if shared := getattr(text_config(model), "num_kv_shared_layers", None) or 0:
        raise UnsupportedModelError(
            f"Layer {len(kinds) - shared} of {name} attends to the keys and values of an earlier "
            f"layer; caches shared by several layers cannot be compressed yet."
        )


def _check_adapters(model: Any, name: str) -> None:
    """Raise `UnsupportedModelError` if an adapter changes the sequence or how it is read."""
    peft = getattr(model, "active_peft_config", None)
    # transformers itself loads adapters without a PeftModel.
    adapters = [peft] if peft else list(getattr(model, "peft_config", {}).values())
    methods, others = ("SHADOW", "XLORA", "LILY"), ("is_prompt_learning", "alora_invocation_tokens")
    refused = [str(getattr(x, "peft_type", "")).endswith(methods) for x in adapters]
    refused += [bool(getattr(x, name, None)) for x in adapters for name in others]
    if any(refused):
        raise UnsupportedModelError(
            f"{name} puts learned tokens before a prompt (prompt or prefix tuning), reads it twice "
            f"(Shadow, X-LoRA), or differently in each call (activated LoRA, Lily), which gracekv "
            f"does not support. It supports adapters that change weights, such as LoRA."
        )


def check_needs(model: Any, needs: Needs, *, passage: bool = False) -> None:
    """Raise `ObserverError` if the model, or a passage, cannot provide what an observer reads."""
    others, driver = other_layers(model), "gracekv.capture"
    if passage:
        driver = "a passage, whose context is mostly dropped,"
    elif others:
        layer = f"layer {others[0].number} ({others[0].kind})"
        driver = f"{type(model).__name__}, whose {layer} does not hold every token,"
    gives: frozenset[Source] = frozenset(get_args(Source))
    gives -= {"passes"} if passage or others else set()
    advice = "Use a single-pass recipe, such as 'gracekv-plus' or 'gracekv-agnostic'."
    check_observers(needs.observers, gives, driver, advice)
