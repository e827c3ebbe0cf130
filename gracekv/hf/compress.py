"""`compress`: from a model and prompts to compressed caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

import torch

from gracekv import recipes
from gracekv.allocate import Budget
from gracekv.backends import BACKENDS, Backend
from gracekv.errors import BudgetError, CacheError, ConfigError, PromptError
from gracekv.hf.attention import attach
from gracekv.hf.batch import BatchResult, batch_result
from gracekv.hf.cache import GraceCache
from gracekv.hf.result import CompressionResult
from gracekv.prefill import Prefill
from gracekv.prefill.capture import capture
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.prompt import Prompt

if TYPE_CHECKING:
    from gracekv.pipeline import Pipeline, Run

Ratio: TypeAlias = int | float | str | Fraction


@overload
def compress(
    model: Any,
    prompt: Prompt,
    *,
    ratio: Ratio | None = None,
    entries_per_head: int | None = None,
    kv_bytes: int | str | None = None,
    pipeline: str | Pipeline = recipes.DEFAULT,
    backend: str | Backend | None = None,
) -> CompressionResult: ...
@overload
def compress(
    model: Any,
    prompt: Sequence[Prompt],
    *,
    ratio: Ratio | None = None,
    entries_per_head: int | None = None,
    kv_bytes: int | str | None = None,
    pipeline: str | Pipeline = recipes.DEFAULT,
    backend: str | Backend | None = None,
) -> BatchResult: ...
def compress(
    model: Any,
    prompt: Prompt | Sequence[Prompt],
    *,
    ratio: Ratio | None = None,
    entries_per_head: int | None = None,
    kv_bytes: int | str | None = None,
    pipeline: str | Pipeline = recipes.DEFAULT,
    backend: str | Backend | None = None,
) -> CompressionResult | BatchResult:
    """Prefill once, compress the context's cache to a budget, and be ready to generate.

    The model is attached (see `gracekv.hf.attach`) and stays so, unless this raises.

    Args:
        model: a transformers causal language model of a tested family, in evaluation mode.
        prompt: a prompt, of which only the context is compressed; or a list of prompts of any
            lengths, which are prefilled one after the other, so that the peak memory is that of
            the largest, and then generate together.
        ratio: how many times fewer entries the context keeps, at least 1.
        entries_per_head: entries per KV head and layer on average, instead of a ratio.
        kv_bytes: bytes of the context's keys and values, or text such as "64MiB", instead.
        pipeline: the name of a recipe, or a pipeline of your own; default: "gracekv-plus", which
            merges nothing. "gracekv" is the paper's method.
        backend: who attends while decoding; default: the pipeline's.

    Each prompt of a list has this budget for itself.

    Raises:
        BudgetError: not exactly one budget is given, or it is too small for the prompt.
        UnsupportedModelError: as `capture` does.
        PromptError: as `capture` does, and for an empty list.
        NonFiniteError: as `capture` does.
    """
    budget = chosen_budget(ratio, entries_per_head, kv_bytes)
    pipe = chosen_pipeline(pipeline, backend)
    if not isinstance(prompt, list | tuple):
        prompt = cast(Prompt, prompt)
        return result_of_run(model, prompt, _run(model, prompt, pipe, budget), pipe)
    if not prompt:
        raise PromptError("compress takes a prompt or a list of at least one; got an empty list.")
    return batch_result(model, prompt, [_run(model, p, pipe, budget) for p in prompt], pipe)


def compress_prefill(
    model: Any,
    prompt: Prompt,
    prefill: Prefill,
    *,
    ratio: Ratio | None = None,
    entries_per_head: int | None = None,
    kv_bytes: int | str | None = None,
    pipeline: str | Pipeline = recipes.DEFAULT,
    backend: str | Backend | None = None,
) -> CompressionResult:
    """`compress` for a prompt that was prefilled before: one prefill, many budgets and pipelines.

        prefill = gracekv.capture(model, prompt)
        results = [compress_prefill(model, prompt, prefill, ratio=x) for x in (4, 8, 16)]

    `prefill` is only read. It must hold what the pipelines need: `capture` keeps everything unless
    told less. The arguments and errors are those of `compress`; beyond them

    Raises:
        MissingCaptureError: the prefill was captured for another pipeline.
        CacheError: the prefill is not this model's, or not this prompt's.
    """
    check_prefill(model, prompt, prefill)
    budget = chosen_budget(ratio, entries_per_head, kv_bytes)
    pipe = chosen_pipeline(pipeline, backend)
    return result_of_run(model, prompt, pipe.run(prefill, budget), pipe)


def check_prefill(model: Any, prompt: Prompt, prefill: Prefill) -> None:
    """Raise `CacheError` unless `prefill` is what `capture(model, prompt)` made."""
    if prefill.spans != prompt.spans or (
        prefill.token_ids is not None and not torch.equal(prefill.token_ids, prompt.ids)
    ):
        raise CacheError(
            f"The prefill is of another prompt: it has {prefill.spans}, the prompt "
            f"{prompt.spans}, or other ids. Use gracekv.capture(model, prompt)."
        )
    now = fingerprint(model)
    other = [name for name, mark in now.items() if prefill.fingerprint.get(name, mark) != mark]
    if other:
        raise CacheError(
            f"The prefill is of another model: {', '.join(other)} differ. Use "
            f"gracekv.capture(model, prompt) with the model that generates."
        )


def _run(model: Any, prompt: Prompt, pipe: Pipeline, budget: Budget) -> Run:
    """One prefill and one run; the prefill is gone when this returns."""
    return pipe.run(capture(model, prompt, pipe.needs()), budget)


def result_of_run(model: Any, prompt: Prompt, run: Run, pipe: Pipeline) -> CompressionResult:
    """Make the run's cache ready to generate; the model is attached."""
    attach(model)
    cache = GraceCache(run.cache, pipe.backend)
    cache.warm(model)
    accounting = dataclasses.replace(run.accounting, backend_bytes=cache.held_bytes)
    run = dataclasses.replace(run, accounting=accounting)
    return CompressionResult(model, prompt, run, cache, pipe)


def chosen_budget(
    ratio: Ratio | None,
    entries_per_head: int | None,
    kv_bytes: int | str | None,
) -> Budget:
    """The one budget that is not None; `BudgetError` if there is none, or several."""
    given = {"ratio": ratio, "entries_per_head": entries_per_head, "kv_bytes": kv_bytes}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise BudgetError(
            f"Give exactly one budget, ratio, entries_per_head or kv_bytes; got "
            f"{' and '.join(names) or 'none'}. For example ratio=8 keeps an eighth of the context."
        )
    if ratio is not None:
        return Budget.ratio(ratio)
    if entries_per_head is not None:
        return Budget.entries_per_head(entries_per_head)
    assert kv_bytes is not None  # narrowed by the check above
    return Budget.kv_bytes(kv_bytes)


def chosen_pipeline(pipeline: str | Pipeline, backend: str | Backend | None) -> Pipeline:
    """The pipeline of that name, or itself, with the backend if one is given.

    Raises `ConfigError` if it is neither.
    """
    from gracekv.pipeline import Pipeline

    if isinstance(pipeline, str):
        pipeline = Pipeline.named(pipeline)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(
            f"pipeline takes a name or a gracekv.pipeline.Pipeline; got {pipeline!r}."
        )
    if backend is None:
        return pipeline
    return dataclasses.replace(pipeline, backend=BACKENDS.parse(backend))
