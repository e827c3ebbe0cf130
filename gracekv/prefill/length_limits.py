"""The lengths of sequences that a model supports, and checks of prompts and continuations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from gracekv.errors import CacheError, LengthWarning, PromptError, UnsupportedModelError
from gracekv.prefill.model_layers import compressed_layers, rope_parameters, text_config
from gracekv.prefill.needs import Needs
from gracekv.prefill.observer import PassObserver
from gracekv.prefill.spans import PromptSpans

# Warn if a prompt leaves less room than this in a bounded sequence. Source: ours.
_ROOM = 1024


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
