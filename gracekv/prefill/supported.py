"""Checks that a model and the lengths of prompt and continuation are supported."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, get_args

import torch

from gracekv.distributed.sharding import check_sharding, is_sharded
from gracekv.errors import CacheError, LengthWarning, PromptError, UnsupportedModelError
from gracekv.prefill.layer_state import WITH_STATES, WITHOUT_CACHE
from gracekv.prefill.model_layers import (
    COMPRESSED,
    attention_module,
    compressed_layers,
    has_rope,
    head_sizes,
    layer_kinds,
    other_layers,
    rope_parameters,
    text_config,
)
from gracekv.prefill.needs import Needs
from gracekv.prefill.observations import check_observers
from gracekv.prefill.observer import PassObserver, Source
from gracekv.prefill.self_check import self_check
from gracekv.prefill.spans import PromptSpans

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
"longrope" also depend on the sequence's length: see `check_prompt_length`."""

# Warn if a prompt leaves less room than this in a bounded sequence. Source: ours.
_ROOM = 1024
_TESTED = f"Tested families: {', '.join(sorted(TESTED_MODEL_TYPES))}."

KINDS = frozenset(COMPRESSED) | {"sliding_attention"} | WITH_STATES | WITHOUT_CACHE
"""Kinds of layers, as transformers names them, that a cache may hold."""


def check_decoder(model: Any) -> None:
    """Raise `UnsupportedModelError` unless `model` is a causal language model of transformers."""
    known = getattr(model, "config", None) is not None and hasattr(model, "get_decoder")
    # Llama 4, which is rejected later, is its own decoder.
    if not known or (model.get_decoder() is model and model.get_output_embeddings() is None):
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
    if model.device.type == "mps":
        raise UnsupportedModelError(
            "The model is on Apple's GPU (mps), which lacks the float64 needed to compute scores. "
            "Move it to the CPU: model.to('cpu')."
        )
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
    # Other peft methods change weights; these change the sequence or how it is read.
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


def check_passes(model: Any, needs: Needs, spans: PromptSpans) -> None:
    """Raise `UnsupportedModelError` if a second pass exceeds the model's trained length."""
    trained = trained_length(model)
    for observer in needs.observers:
        reach = observer.reach(spans) if isinstance(observer, PassObserver) else 0
        if trained is not None and reach > max(trained, spans.length):
            raise UnsupportedModelError(
                f"{observer!r} runs a second pass that takes {reach} positions or more, "
                f"but {type(model).__name__} was trained for {trained}. Use a shorter context, a "
                f"single-pass recipe, or CaptureOptions(beyond_positions=True)."
            )


def sliding_window(model: Any) -> int | None:
    """Number of tokens that compressed layers see if all layers slide; None if they see all."""
    return compressed_layers(model)[0].window or None


def switch_point(model: Any) -> int | None:
    """The sequence length beyond which the model's RoPE changes, or None.

    "longrope" has two sets of frequencies; the Phi-3 classes of transformers drop any cache
    when `generate` passes that point, whatever their RoPE is.
    """
    if model.config.model_type == "phi3":
        return int(model.config.original_max_position_embeddings)
    rope = rope_parameters(model)
    if rope.get("rope_type") == "longrope":
        return int(rope["original_max_position_embeddings"])
    return None


def dynamic_limit(model: Any) -> int | None:
    """The sequence length beyond which rotations depend on the length (dynamic RoPE), or None."""
    return trained_length(model) if rope_parameters(model).get("rope_type") == "dynamic" else None


def trained_length(model: Any) -> int | None:
    """Number of positions that the model was trained or extended for, or None if unknown."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    rope = rope_parameters(model)
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if not positions:
        return None
    # Configs with these often leave max_position_embeddings at its old value.
    if rope.get("rope_type") in ("linear", "yarn") and factor:
        return max(int(positions), int((original or positions) * factor))
    return int(positions)


def closable_length(model: Any) -> int | None:
    """The largest distance between a re-rotated key and a query, or None if unknown.

    Raises `CacheError` if rotations depend on the length, or the cache has a maximum length.
    """
    bound = longest_sequence(model, 1)
    if rope_parameters(model).get("rope_type") == "dynamic":
        bound = 0, "its dynamic RoPE depends on the length"
    if bound is not None:
        raise CacheError(f"{type(model).__name__} does not support closed positions: {bound[1]}.")
    return trained_length(model)


def longest_sequence(model: Any, prompt_length: int) -> tuple[int, str] | None:
    """The length up to which a cache of this prompt fits the model, and what happens beyond it.

    None if there is no such length. Prompt and continuation count, except for the last new token,
    which is never fed.
    """
    bounds = []
    if (window := sliding_window(model)) is not None:
        bounds.append((window, "its layers stop seeing the first tokens (sliding window)"))
    if (switch := switch_point(model)) is not None and prompt_length <= switch:
        bounds.append((switch, "it changes its RoPE and transformers drops the cache"))
    return min(bounds, default=None)


def check_prompt_length(model: Any, length: int, *, beyond_positions: bool = False) -> None:
    """Reject or warn about a prompt whose `length` in tokens the model cannot handle as usual.

    Raises `UnsupportedModelError` if a sliding window does not cover it, and `PromptError` beyond
    the trained length (times the factor of dynamic RoPE), unless `beyond_positions` makes it a
    warning, or if transformers would drop a Phi-3's cache at the first step. Warns
    (`LengthWarning`) if little room is left before a length at which the cache ends.
    """
    name = type(model).__name__
    window, switch, trained = sliding_window(model), switch_point(model), trained_length(model)
    if window is not None and length > window:
        raise UnsupportedModelError(
            f"{name} has a sliding window of {window} tokens, and the prompt has {length}: "
            f"its cache is already bounded. Use a prompt that fits in the window, or a model "
            f"with full attention in every layer."
        )
    if switch is not None and length == switch + 1:
        raise PromptError(
            f"{name} changes its RoPE after {switch} tokens and transformers then drops the cache; "
            f"a prompt of exactly {length} tokens hits that switch. Make it one token longer or "
            f"shorter."
        )
    if trained is not None and length > trained:
        rope, reach = rope_parameters(model), float(trained)
        what = "Answers may be poor, with and without compression."
        if rope.get("rope_type") == "dynamic":
            reach *= rope.get("factor") or 1
            what = (
                "Its dynamic RoPE then rotates by the longest sequence seen so far, so answers "
                "depend on what the model was run on before."
            )
        message = f"The prompt has {length} tokens, but {name} was trained for {trained}. {what}"
        if length > reach and not beyond_positions:
            raise PromptError(
                f"{message} Use a shorter prompt or a model trained for longer ones; to read it "
                f"anyway, pass CaptureOptions(beyond_positions=True), or on the command line "
                f"--beyond-positions."
            )
        _warn(message)
    if (bound := longest_sequence(model, length)) is not None and bound[0] - length < _ROOM:
        _warn(
            f"{name} can continue this prompt for {bound[0] - length + 1} tokens: beyond a length "
            f"of {bound[0]}, {bound[1]}. Keep max_new_tokens below that."
        )


def check_continuation(model: Any, lengths: Sequence[int], new_tokens: int) -> None:
    """Check that `new_tokens` may follow the cached prompts of these `lengths`, as one batch.

    Raises `CacheError` if they exceed `longest_sequence`, if the rows lie on both sides of the
    `switch_point`, or if rows of different lengths pass the `dynamic_limit`: a batch rotates by its
    longest row, padding included.
    """
    name, longest, switch = type(model).__name__, max(lengths), switch_point(model)
    if switch is not None and min(lengths) <= switch < longest:
        raise CacheError(
            f"{name} changes its RoPE after {switch} tokens; prompts of {sorted(lengths)} lie on "
            f"both sides. Generate for the shorter and the longer ones in separate batches."
        )
    limit = dynamic_limit(model)
    if limit is not None and min(lengths) < longest and longest + new_tokens - 1 > limit:
        raise CacheError(
            f"{name} rotates a batch by its longest row beyond {limit} tokens (dynamic RoPE); "
            f"{new_tokens} new tokens after prompts of {sorted(lengths)} would rotate the shorter "
            f"rows differently from their cached keys. Generate for each prompt alone."
        )
    bound = longest_sequence(model, longest)
    if bound is not None and longest + new_tokens - 1 > bound[0]:
        raise CacheError(
            f"A prompt of {longest} tokens and {new_tokens} new ones exceed {bound[0]} tokens, "
            f"beyond which {name} cannot use this cache: {bound[1]}. Generate at most "
            f"{max(0, bound[0] - longest + 1)} tokens, or use a longer or shorter prompt."
        )


def _warn(message: str) -> None:
    # check_prompt_length, capture and its decorator are between here and the caller.
    warnings.warn(message, LengthWarning, stacklevel=5)
