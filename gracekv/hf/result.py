"""`CompressionResult`: a compressed prompt, ready to be continued any number of times."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gracekv.errors import ConfigError
from gracekv.hf.cache import GraceCache
from gracekv.hf.generation import continue_ids, decode_rows, padded_inputs
from gracekv.hf.saving import save_result
from gracekv.prefill.prompt import Prompt

if TYPE_CHECKING:
    from gracekv.cache import Accounting, Timings
    from gracekv.pipeline import Pipeline, Run


@dataclass(frozen=True, slots=True, eq=False)
class CompressionResult:
    """What `compress` returns. The prefill is not kept: its memory is what compression frees.

    Attributes:
        model: the model that the cache belongs to.
        prompt: what was compressed.
        run: partition, relevance, forest, frontier and packed cache, for inspection.
        template: the cache that `cache` copies; its tail stays empty.
        pipeline: what made it, with the backend that reads it.
    """

    model: Any
    prompt: Prompt
    run: Run
    template: GraceCache
    pipeline: Pipeline

    @property
    def cache(self) -> GraceCache:
        """A new cache with an empty tail, over the one packed part that all of them share.

        Each access gives another cache: keep it in a variable to continue a conversation on it.
        """
        return self.template.fresh()

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What `model.generate` takes beside the cache: the whole prompt's ids and their mask.

        "input_ids" and "attention_mask", int64 [1, T], on the model's device.
        """
        return padded_inputs(self.model, [self.prompt])

    @property
    def accounting(self) -> Accounting:
        """Entries and bytes: asked for, spent, and by part."""
        return self.run.accounting

    @property
    def timings(self) -> Timings:
        """Wall seconds of the capture and of each stage."""
        return self.run.timings

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compressed prompt to one safetensors file, for `gracekv.load(path, model)`.

        The file holds the entries, token ids and spans, the pipeline, the accounting, and what
        identifies model and tokenizer; not the prompt's text, and not what the stages made on the
        way. It is written completely or not at all.
        """
        save_result(
            path, self.model, [self.prompt], [self.run], self.run.cache, self.pipeline, batch=False
        )

    def report(
        self, path: str | os.PathLike[str], *, label: str | None = None, answer: str | None = None
    ) -> None:
        """Write one HTML page that shows what was kept where; see `gracekv.report`.

        The page needs no network and no other file; it holds the prompt's text. Several results
        side by side: `gracekv.report.compare`.

        Args:
            path: the file; its folder is made.
            label: the result's name on the page; default: how many times fewer entries it keeps.
            answer: what the model said, shown beside the accounting.

        Raises `ReportError` if the result was loaded from a file and holds merged entries: what
        they stand for is not in the file.
        """
        from gracekv.report import write

        write(path, self, label=label, answer=answer)

    def generate(self, max_new_tokens: int = 64, **kwargs: Any) -> str:
        """The model's answer as text, greedy unless `kwargs` say otherwise.

        `kwargs` go to `model.generate`. Every call starts from the compressed prompt, so calls
        can be repeated. Raises `PromptError` if the prompt has no tokenizer, `ConfigError` if more
        than one sequence comes back.
        """
        if kwargs.get("num_return_sequences", 1) != 1:
            raise ConfigError(
                f"generate returns one text; got num_return_sequences="
                f"{kwargs['num_return_sequences']}. Use generate_ids and decode its rows."
            )
        return decode_rows([self.prompt], self.generate_ids(max_new_tokens, **kwargs))[0]

    def generate_ids(self, max_new_tokens: int = 64, **kwargs: Any) -> Tensor:
        """int64 [rows, new tokens]: ids after the prompt, as `model.generate` returns them.

        One row unless `num_return_sequences` asks for more. Greedy unless `kwargs`, which go to
        `model.generate`, say otherwise. Raises `CacheError` if so many tokens would outgrow what
        the model's RoPE or sliding window lets a cache cover.
        """
        return continue_ids(self.model, [self.prompt], self.cache, max_new_tokens, kwargs)
