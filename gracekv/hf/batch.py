"""`BatchResult`: several compressed prompts of any lengths, continued together."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gracekv.cache import Accounting, RaggedCache
from gracekv.errors import PromptError
from gracekv.hf.attention import attach
from gracekv.hf.cache import GraceCache
from gracekv.hf.generation import continue_ids, decode_rows, padded_inputs
from gracekv.hf.saving import save_result
from gracekv.prefill.prompt import Prompt

if TYPE_CHECKING:
    from gracekv.pipeline import Pipeline, Run


@dataclass(frozen=True, slots=True, eq=False)
class BatchResult:
    """What `compress` returns for a list of prompts; each has its own partition and budget.

    Attributes:
        model: the model that the cache belongs to.
        prompts: what was compressed, in order.
        runs: one per prompt; their packed caches are views of the batch's.
        template: the cache that `cache` copies; its tail stays empty.
        pipeline: what made it, with the backend that reads it.
    """

    model: Any
    prompts: tuple[Prompt, ...]
    runs: tuple[Run, ...]
    template: GraceCache
    pipeline: Pipeline

    @property
    def cache(self) -> GraceCache:
        """A new cache with an empty tail, over the one packed part that all of them share."""
        return self.template.fresh()

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What `model.generate` takes beside the cache: the prompts, padded on the left.

        "input_ids" and "attention_mask", int64 [S, T of the longest], on the model's device.
        """
        return padded_inputs(self.model, self.prompts)

    @property
    def accountings(self) -> tuple[Accounting, ...]:
        """Entries and bytes of each prompt; the backend's copies are in `accounting` only."""
        return tuple(run.accounting for run in self.runs)

    @property
    def accounting(self) -> Accounting:
        """Entries and bytes of all prompts together: [S*L, G] entries, prompt after prompt."""
        return Accounting.total(self.accountings, backend_bytes=self.template.held_bytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all compressed prompts to one safetensors file; see `CompressionResult.save`."""
        layers = tuple(layer.packed.ragged for layer in self.template.layers)
        packed = RaggedCache(layers, self.template.packed_length, self.template.padding)
        save_result(path, self.model, self.prompts, self.runs, packed, self.pipeline, batch=True)

    def report(
        self, path: str | os.PathLike[str], *, answers: Sequence[str] | None = None
    ) -> tuple[Path, ...]:
        """Write a page for each prompt, page-1.html, page-2.html, ... for the path page.html.

        Returns their paths. `answers` are what the model said, prompt by prompt. Raises
        `ReportError` as `CompressionResult.report` does.
        """
        from gracekv.report import write_all

        return write_all(path, self, answers=answers)

    def generate(self, max_new_tokens: int = 64, **kwargs: Any) -> list[str]:
        """The model's answer to each prompt as text, greedy unless `kwargs` say otherwise.

        `kwargs` go to `model.generate`; with num_return_sequences=n there are n answers to the
        first prompt, then n to the second. Raises `PromptError` if a prompt has no tokenizer.
        """
        return decode_rows(self.prompts, self.generate_ids(max_new_tokens, **kwargs))

    def generate_ids(self, max_new_tokens: int = 64, **kwargs: Any) -> Tensor:
        """int64 [rows, new tokens]: ids after the prompts, as `model.generate` returns them.

        Rows that end early are filled with the padding id. Greedy unless `kwargs`, which go to
        `model.generate`, say otherwise.
        """
        return continue_ids(self.model, self.prompts, self.cache, max_new_tokens, kwargs)


def batch_result(
    model: Any, prompts: Sequence[Prompt], runs: Sequence[Run], pipeline: Pipeline
) -> BatchResult:
    """Put the caches of `runs` side by side in one; the model is attached.

    Raises `PromptError` if prompts are missing or have different tokenizers.
    """
    if len({id(prompt.tokenizer) for prompt in prompts}) != 1:
        raise PromptError(
            "The prompts of a batch must share one tokenizer object (or have none), which decodes "
            "all of their rows. Build them with the same tokenizer."
        )
    attach(model)
    packed = RaggedCache.stack([run.cache for run in runs])
    views = tuple(
        dataclasses.replace(run, cache=packed.sequence(number)) for number, run in enumerate(runs)
    )
    cache = GraceCache(packed, pipeline.backend)
    cache.warm(model)
    return BatchResult(model, tuple(prompts), views, cache, pipeline)
