"""`generate`: compression inside a call of transformers' own `model.generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gracekv.allocate.budget import Number
from gracekv.decode import Limit
from gracekv.errors import ConfigError, PromptError
from gracekv.hf.compress import compress
from gracekv.pipeline import Pipeline
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
    pipeline: str | Pipeline | None = None,
    question_tokens: int = 64,
    limit: Limit | None = None,
    **model_kwargs: Any,
) -> Any:
    """Compress the prompt's cache before decoding; for `custom_generate`.

        model.generate(**inputs, custom_generate=gracekv.generate, ratio=8, max_new_tokens=64)

    transformers prepares the arguments without a default and calls this in place of its own loop,
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
        question_tokens: how many of the last tokens stay whole and say what matters, as the
            question and the end of the chat format do; 0: the prompt has no question.
        limit: the most that the cache may hold while decoding.
        model_kwargs: transformers' own.

    Raises what `gracekv.compress` raises, `PromptError` for several rows or padding, and
    `ConfigError` for beams and for several answers.
    """
    if generation_config.num_beams != 1 or generation_config.num_return_sequences != 1:
        raise ConfigError(
            "custom_generate decodes one answer without beams. Use gracekv.compress and "
            "result.generate(num_beams=...)."
        )
    mask = model_kwargs.pop("attention_mask", None)
    if len(input_ids) != 1 or (mask is not None and not bool(mask.all())):
        raise PromptError(
            "custom_generate takes one prompt without padding. Use gracekv.compress with a list of "
            "prompts."
        )
    end = input_ids.shape[1] - question_tokens
    prompt = Prompt.from_ids(input_ids, (0, max(1, end)))
    budget: Any = {"ratio": ratio, "entries_per_head": entries_per_head, "kv_bytes": kv_bytes}
    result = compress(model, prompt, pipeline=pipeline, **budget)
    # A mask as long as the ids says that they begin with what is cached.
    seen = {
        "past_key_values": result.new_cache(limit),
        "attention_mask": torch.ones_like(input_ids),
    }
    return model._sample(
        input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs | seen
    )
