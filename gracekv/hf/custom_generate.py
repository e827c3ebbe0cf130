"""`generate`: compresses a prompt inside transformers' `model.generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate.budget import Budget, Number
from gracekv.decode import Limit
from gracekv.errors import ConfigError, PromptError, expect
from gracekv.hf.compress import compress
from gracekv.pipeline import Pipeline
from gracekv.prefill.cache_keyword import cache_keyword
from gracekv.prefill.length_limits import check_continuation
from gracekv.prefill.prompt import Prompt


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    ratio: Number | None = None,
    entries_per_head: int | None = None,
    kv_bytes: int | str | None = None,
    pipeline: str | Path | Pipeline | None = None,
    question_tokens: int = 64,
    limit: Limit | None = None,
    text_streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Compress the prompt's cache inside transformers' `model.generate`; for `custom_generate`.

        model.generate(**inputs, custom_generate=gracekv.generate, ratio=8, max_new_tokens=64)

    transformers prepares the arguments without a default and calls this instead of its own loop,
    which then runs over the compressed cache.

    Args:
        model: as for `gracekv.compress`; it is attached.
        input_ids: int64 [1, T]: one prompt, without padding.
        logits_processor: transformers' own.
        stopping_criteria: transformers' own.
        generation_config: greedy decoding or sampling.
        ratio: tokens per entry kept; or give `entries_per_head` or `kv_bytes`.
        entries_per_head: as for `gracekv.compress`.
        kv_bytes: as for `gracekv.compress`.
        pipeline: as for `gracekv.compress`.
        question_tokens: how many of the last tokens stay uncompressed and determine what matters:
            the question and the end of the chat format; 0 if the prompt has no question.
        limit: the most that the cache may hold while decoding.
        text_streamer: receives the prompt and each new token; transformers does not pass its own
            `streamer`, assistant models or stop strings' tokenizer to such a function.
        model_kwargs: transformers' own.

    Raises what `gracekv.compress` and `result.generate_ids` raise, `PromptError` for several rows
    or padding, and `ConfigError` for beams and for several answers.
    """
    if generation_config.num_beams != 1 or generation_config.num_return_sequences != 1:
        raise ConfigError(
            "custom_generate decodes one answer without beams. Use gracekv.compress and "
            "result.generate(num_beams=...)."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise PromptError("custom_generate reads token ids. Leave inputs_embeds out.")
    mask = model_kwargs.pop("attention_mask", None)
    if len(input_ids) != 1 or (mask is not None and not bool(mask.all())):
        raise PromptError(
            "custom_generate takes one prompt without padding. Use gracekv.compress for several."
        )
    expect(question_tokens, int, "question_tokens takes a whole number of tokens")
    length = input_ids.shape[1]
    if length < 2 or (length <= question_tokens and ratio not in (None, 1)):
        raise PromptError(
            f"custom_generate compresses what precedes the last question_tokens: give fewer, or a "
            f"longer prompt. Got question_tokens={question_tokens} and {length} tokens."
        )
    check_continuation(model, [length], generation_config.max_length - length)
    prompt = Prompt.from_ids(input_ids, (0, max(1, length - question_tokens)))
    sizes = {"ratio": ratio, "entries_per_head": entries_per_head, "kv_bytes": kv_bytes}
    result = compress(model, prompt, pipeline=pipeline, budget=Budget.of(sizes, sizes))
    # A mask as long as the ids tells the model that they begin with cached tokens.
    model_kwargs |= {"attention_mask": torch.ones_like(input_ids), "streamer": text_streamer}
    model_kwargs[cache_keyword(model.forward)] = result.new_cache(limit)
    if text_streamer is not None:
        text_streamer.put(input_ids.cpu())
    given = input_ids, logits_processor, stopping_criteria, generation_config
    return model._sample(*given, **model_kwargs)
