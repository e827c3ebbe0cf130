"""`CompressionResult`: a compressed prompt, ready to be continued any number of times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gracekv.errors import ConfigError, PromptError
from gracekv.hf.attention import attach
from gracekv.hf.cache import GraceCache
from gracekv.prefill.capture import input_device
from gracekv.prefill.lengths import check_continuation
from gracekv.prefill.prompt import Prompt

if TYPE_CHECKING:
    from gracekv.cache import Accounting, Timings
    from gracekv.pipeline import Run


@dataclass(frozen=True, slots=True, eq=False)
class CompressionResult:
    """What `compress` returns. The prefill is not kept: its memory is what compression frees.

    Attributes:
        model: the model that the cache belongs to.
        prompt: what was compressed.
        run: partition, relevance, forest, frontier and packed cache, for inspection.
        template: the cache that `cache` copies; its tail stays empty.
    """

    model: Any
    prompt: Prompt
    run: Run
    template: GraceCache

    @property
    def cache(self) -> GraceCache:
        """A new cache with an empty tail, over the one packed part that all of them share.

        Each access gives another cache: keep it in a variable to continue a conversation on it.
        """
        return self.template.fresh()

    @property
    def accounting(self) -> Accounting:
        """Entries and bytes: asked for, spent, and by part."""
        return self.run.accounting

    @property
    def timings(self) -> Timings:
        """Wall seconds of the capture and of each stage."""
        return self.run.timings

    def generate(self, max_new_tokens: int = 64, **kwargs: Any) -> str:
        """The model's answer as text, greedy unless `kwargs` say otherwise.

        `kwargs` go to `model.generate`. Every call starts from the compressed prompt, so calls
        can be repeated. Raises `PromptError` if the prompt has no tokenizer, `ConfigError` if more
        than one sequence comes back.
        """
        tokenizer = self.prompt.tokenizer
        if tokenizer is None:
            raise PromptError(
                "This prompt was made from ids without a tokenizer, so there is no text. Use "
                "generate_ids, or Prompt.from_ids(..., tokenizer=tokenizer)."
            )
        if kwargs.get("num_return_sequences", 1) != 1:
            raise ConfigError(
                f"generate returns one text; got num_return_sequences="
                f"{kwargs['num_return_sequences']}. Use generate_ids and decode its rows."
            )
        ids = self.generate_ids(max_new_tokens, **kwargs)
        text: str = tokenizer.decode(ids[0], skip_special_tokens=True)
        return text

    def generate_ids(self, max_new_tokens: int = 64, **kwargs: Any) -> Tensor:
        """int64 [rows, new tokens]: ids after the prompt, as `model.generate` returns them.

        One row unless `num_return_sequences` asks for more. Greedy unless `kwargs`, which go to
        `model.generate`, say otherwise. Raises `CacheError` if so many tokens would outgrow what
        the model's RoPE or sliding window lets a cache cover.
        """
        check_continuation(self.model, self.prompt.spans.length, max_new_tokens)
        attach(self.model)
        ids = self.prompt.ids[None].to(input_device(self.model))
        if "do_sample" not in kwargs:
            # The model's own sampling settings would only raise warnings here.
            kwargs = {
                "do_sample": False,
                "temperature": None,
                "top_p": None,
                "top_k": None,
            } | kwargs
        config = self.model.generation_config
        if config.pad_token_id is None and config.eos_token_id is not None:
            eos = config.eos_token_id
            kwargs.setdefault("pad_token_id", eos[0] if isinstance(eos, list) else eos)
        output = self.model.generate(
            ids,
            past_key_values=self.cache,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            **kwargs,
        )
        sequences: Tensor = output if isinstance(output, Tensor) else output.sequences
        return sequences[:, ids.shape[1] :]
