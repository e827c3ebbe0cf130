"""From compressed prompts to new tokens: the ids, masks and settings that `generate` is given."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import PromptError
from gracekv.hf import graph_replay
from gracekv.hf.attention import attach
from gracekv.hf.cache import GraceCache
from gracekv.prefill.attention_patch import input_device
from gracekv.prefill.length_limits import check_continuation
from gracekv.prefill.prompt import Prompt


def padded_inputs(model: Any, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    """ "input_ids" and "attention_mask" [B, T], padded on the left, on the model's device."""
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = torch.full((len(prompts), longest), _padding_id(model, prompts[0]))
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt.ids) :] = prompt.ids
        mask[row, longest - len(prompt.ids) :] = 1
    device = input_device(model)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def continue_ids(
    model: Any,
    prompts: Sequence[Prompt],
    cache: GraceCache,
    max_new_tokens: int,
    options: dict[str, Any],
) -> Tensor:
    """int64 [rows, new tokens] of `model.generate` over `cache`, greedy unless `options` say else.

    Raises `CacheError` if so many tokens would outgrow what the model's RoPE or sliding window
    lets a cache cover.
    """
    check_continuation(model, [prompt.spans.length for prompt in prompts], max_new_tokens)
    attach(model)
    inputs = padded_inputs(model, prompts)
    if "do_sample" not in options:
        # The model's own sampling settings would only raise warnings here.
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        options = greedy | options
    if model.generation_config.pad_token_id is None:
        options = {"pad_token_id": _padding_id(model, prompts[0])} | options
    if options.get("stop_strings") is not None:
        options = {"tokenizer": prompts[0].tokenizer} | options
    with ExitStack() as stack:
        if graph_replay.suits(model, cache, max_new_tokens, options):
            cache = stack.enter_context(graph_replay.replaying(model, cache, max_new_tokens))
        output = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=max_new_tokens, **options
        )
    sequences: Tensor = output if isinstance(output, Tensor) else output.sequences
    return sequences[:, inputs["input_ids"].shape[1] :]


def decode_rows(prompts: Sequence[Prompt], rows: Tensor) -> list[str]:
    """Each of `rows` [B, n] as text; raises `PromptError` if the prompts have no tokenizer."""
    tokenizer = prompts[0].tokenizer
    if tokenizer is None:
        raise PromptError(
            "This prompt was made from ids without a tokenizer, so there is no text. Use "
            "generate_ids, or Prompt.from_ids(..., tokenizer=tokenizer)."
        )
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def _padding_id(model: Any, prompt: Prompt) -> int:
    """The id that fills masked places; any id of the vocabulary would do."""
    config = model.generation_config
    candidates = (
        config.pad_token_id,
        getattr(prompt.tokenizer, "pad_token_id", None),
        config.eos_token_id,
    )
    known = next((x for x in candidates if x is not None), 0)
    return int(known[0] if isinstance(known, list) else known)
