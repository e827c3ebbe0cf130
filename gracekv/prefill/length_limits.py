"""Lengths of prompt and continuation up to which a cache stays valid for a model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from gracekv.errors import CacheError, LengthWarning, PromptError, UnsupportedModelError
from gracekv.prefill.model_layers import compressed_layers, rope_parameters, text_config

# A prompt that leaves less than this to a bounded sequence is warned about. Source: ours.
_ROOM = 1024


def sliding_window(model: Any) -> int | None:
    """Tokens that the compressed layers see where all layers slide; None if they see all."""
    window = compressed_layers(model)[0].window
    return int(window) if window else None


def switch_point(model: Any) -> int | None:
    """The sequence length beyond which the model's RoPE changes, or None.

    "longrope" has two sets of frequencies; the Phi-3 classes of transformers drop any cache
    when `generate` passes that point, whatever their RoPE is.
    """
    config = model.config
    if config.model_type == "phi3":
        return int(config.original_max_position_embeddings)
    rope = rope_parameters(model)
    if rope.get("rope_type") == "longrope":
        return int(rope["original_max_position_embeddings"])
    return None


def trained_length(model: Any) -> int | None:
    """Positions that the model was trained or stretched for, or None if its config does not say."""
    known = getattr(text_config(model), "max_position_embeddings", None)
    rope = rope_parameters(model)
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if not known:
        return None
    # Configs that turn these on often leave max_position_embeddings at what it was before.
    if rope.get("rope_type") in ("linear", "yarn") and factor:
        return max(int(known), int((original or known) * factor))
    return int(known)


def longest_sequence(model: Any, prompt_length: int) -> tuple[int, str] | None:
    """The length up to which a cache of this prompt fits the model, and what happens beyond it.

    None if there is no such length. Prompt and continuation count, but for the last new token,
    which is never fed.
    """
    bounds = []
    window = sliding_window(model)
    if window is not None:
        bounds.append((window, "its layers stop seeing the first tokens (sliding window)"))
    switch = switch_point(model)
    if switch is not None and prompt_length <= switch:
        bounds.append((switch, "it changes its RoPE and transformers drops the cache"))
    return min(bounds, default=None)


def check_prompt_length(model: Any, length: int, *, beyond_positions: bool = False) -> None:
    """Refuse or warn about a prompt of `length` tokens that the model cannot treat as usual.

    Raises `UnsupportedModelError` if a sliding window does not cover the prompt, and `PromptError`
    beyond the trained length (where dynamic RoPE stretches it, its factor times that), unless
    `beyond_positions` makes that a warning, and at the one length at which transformers drops the
    cache of a Phi-3 at the first step. Warns (`LengthWarning`) where little room is left before a
    length at which the cache ends.
    """
    name = type(model).__name__
    window, switch, trained = sliding_window(model), switch_point(model), trained_length(model)
    if window is not None and length > window:
        raise UnsupportedModelError(
            f"{name} has layers with a sliding window of {window} tokens, the prompt has {length}: "
            f"their caches are bounded already. Use a prompt that the window covers, or a model "
            f"with full attention in every layer."
        )
    if switch is not None and length == switch + 1:
        raise PromptError(
            f"{name} changes its RoPE after {switch} tokens and transformers then drops the cache; "
            f"a prompt of {length} tokens lies on that edge. Make it one token longer or shorter."
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
        said = f"The prompt has {length} tokens, {name} was made for {trained}. {what}"
        if length > reach and not beyond_positions:
            raise PromptError(
                f"{said} Use a shorter prompt or a model made for longer ones; to read it "
                f"nevertheless, give CaptureOptions(beyond_positions=True), on the command line "
                f"--beyond-positions."
            )
        _warn(said)
    bound = longest_sequence(model, length)
    if bound is not None and bound[0] - length < _ROOM:
        _warn(
            f"{name} can continue this prompt for {bound[0] - length + 1} tokens: beyond a length "
            f"of {bound[0]}, {bound[1]}. Keep max_new_tokens below that."
        )


def check_continuation(model: Any, lengths: Sequence[int], new_tokens: int) -> None:
    """Check that `new_tokens` may follow the cached prompts of these `lengths`, as one batch.

    Raises `CacheError` if they pass `longest_sequence`, or if the prompts lie on both sides of the
    `switch_point`: a batch rotates by its longest row, and counts padding.
    """
    name, longest, switch = type(model).__name__, max(lengths), switch_point(model)
    if switch is not None and min(lengths) <= switch < longest:
        raise CacheError(
            f"{name} changes its RoPE after {switch} tokens; prompts of {sorted(lengths)} lie on "
            f"both sides. Generate for the shorter and the longer ones in batches of their own."
        )
    bound = longest_sequence(model, longest)
    if bound is not None and longest + new_tokens - 1 > bound[0]:
        raise CacheError(
            f"{new_tokens} new tokens after a prompt of {longest} pass a length of {bound[0]}, "
            f"where {name} no longer fits its cache: {bound[1]}. Generate at most "
            f"{max(0, bound[0] - longest + 1)} tokens, or use a longer or shorter prompt."
        )


def _warn(message: str) -> None:
    # check_prompt_length, capture and its decorator lie between here and the caller.
    warnings.warn(message, LengthWarning, stacklevel=5)
