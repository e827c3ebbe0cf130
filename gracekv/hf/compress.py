"""`compress`: makes compressed caches of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from gracekv import recipes
from gracekv.allocate import Budget, BudgetOptions, BudgetPlan
from gracekv.backends import BACKENDS, Backend
from gracekv.distributed.agreement import in_step
from gracekv.errors import CacheError, ConfigError, PromptError, expect
from gracekv.hf.capture import PROMPT, prefilled_run
from gracekv.hf.result import BatchResult, CompressionResult
from gracekv.pipeline import Pipeline
from gracekv.pipeline.config import load_pipeline
from gracekv.pipeline.run import Run
from gracekv.precision import AllocatedPrecision
from gracekv.prefill import Prefill
from gracekv.prefill.fingerprint import check_same_model
from gracekv.prefill.model_layers import cache_dtype, head_sizes
from gracekv.prefill.options import DEFAULTS, CaptureOptions, trim_memory
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.supported import check_model


class _Options(BudgetOptions, total=False):
    """How `compress` treats each prompt."""

    pipeline: str | Path | Pipeline | None
    backend: str | Backend | None
    keep_run: bool
    capture: CaptureOptions


# Suggestions for mistyped keywords of `compress`.
_WORDS = {x: x for x in (*_Options.__annotations__, "prefill")} | {
    "recipe": "pipeline",
    "max_new_tokens": "result.generate(max_new_tokens=...)",
    "question": "gracekv.Prompt.from_chat(..., question=...)",
}


@overload
def compress(
    model: Any, prompt: Prompt, *, prefill: Prefill | None = None, **options: Unpack[_Options]
) -> CompressionResult: ...
@overload
def compress(
    model: Any,
    prompt: Sequence[Prompt],
    *,
    prefill: Sequence[Prefill] | None = None,
    **options: Unpack[_Options],
) -> BatchResult: ...
def compress(
    model: Any,
    prompt: Prompt | Sequence[Prompt],
    *,
    prefill: Prefill | Sequence[Prefill] | None = None,
    pipeline: str | Path | Pipeline | None = None,
    backend: str | Backend | None = None,
    keep_run: bool = False,
    capture: CaptureOptions = DEFAULTS,
    **budget: Unpack[BudgetOptions],
) -> CompressionResult | BatchResult:
    """Prefill once, and compress the context's cache to a budget, ready to generate.

    The model is attached (see `gracekv.hf.attach`) and stays attached unless this raises; use
    `gracekv.attached` to limit that to a block.

        result = gracekv.compress(model, prompt, ratio=8)

    With `prefill`, the model is not run: one prefill serves many budgets and pipelines.

        prefill = gracekv.capture(model, prompt)
        results = [gracekv.compress(model, prompt, prefill=prefill, ratio=x) for x in (4, 8, 16)]

    Give exactly one of the five budgets; it applies to each prompt of a list separately.

    If the model's heads are spread over processes (tensor parallelism), every process calls this
    with the same arguments and gets its own heads of the result; see "More than one GPU" in the
    docs. `accounting` counts the heads of all processes.

    Args:
        model: a transformers causal language model of a tested family, in evaluation mode.
        prompt: a prompt, of which only the context is compressed, or a list of prompts of any
            lengths. They are prefilled one after another and then generate as a batch; peak memory
            is that of the largest prefill plus all compressed caches, twice while they are joined.
        prefill: the result of `capture(model, prompt)`, which is not modified; a list for a list of
            prompts. It must hold what the pipeline needs: `capture` keeps what most recipes read.
        pipeline: the name of a recipe, a file, or a `Pipeline`; default: "gracekv-plus", or
            "gracekv-agnostic" for a prompt without a question; for a budget in bytes, and for a
            ratio if the model computes in 16 bits, "gracekv-plus-allocated" or
            "gracekv-agnostic-allocated". "gracekv" is the paper's method.
        backend: the attention backend for decoding; default: the pipeline's.
        keep_run: keep the results of the stages (scores, trees, selection) in `result.details`;
            otherwise a result keeps the scores and the selection, compactly and on the CPU.
        capture: how the prefill runs: chunks, memory, progress; see `CaptureOptions`. With
            `prefill`, only `trim` has an effect.
        budget: `ratio`, `budget`, `entries_per_head`, `kv_bytes` or `compression_ratio`; see
            `BudgetOptions`.

    Raises:
        BudgetError: not exactly one budget is given, or it is too small for a prompt; found from
            the model's config and the prompts before the model runs.
        UnsupportedModelError: as `capture` does.
        PromptError: as `capture` does; for an empty list, and for prompts of several tokenizers.
        CaptureMemoryError: memory ran out during the prefill.
        NonFiniteError: as `capture` does.
        MissingCaptureError: the prefill was captured for another pipeline.
        ConfigError: no such pipeline or backend; prompts with and without a question; `stream=True`
            where something needs the whole cache.
        CacheError: the prefill belongs to another model or prompt.
        RankError: a process of a sharded model failed, exited, does not answer, or was called with
            other arguments.
    """
    with in_step(model) as shard:
        target = Budget.of(budget, others=_WORDS)
        check_model(model)
        expect(capture, CaptureOptions, "compress takes capture=gracekv.CaptureOptions(...)")
        is_batch = isinstance(prompt, list | tuple)
        prompts: Sequence[Any] = prompt if is_batch else [prompt]  # type: ignore[assignment]
        pipe = chosen_pipeline(model, target, pipeline, backend, prompts)
        prefills: Any = prefill if is_batch and prefill is not None else [prefill] * len(prompts)
        plans = _checked_plans(model, prompts, prefills, pipe, target)
        if capture.stream and prefill is not None:
            raise ConfigError("A prefill holds all layers: leave out prefill, or stream=True.")
        limits = [x is not None for x in prefills], capture.chunk, capture.memory_limit
        facts = [(x.ids.tolist(), x.spans) for x in prompts]
        others = {"prefill, chunk or memory_limit": limits}
        shard.agree(prompt=facts, pipeline=pipe, budget=target, **others)
        runs = list[Run]()
        for one, captured, plan in zip(prompts, prefills, plans, strict=True):
            if captured is None:
                runs.append(prefilled_run(model, one, None, pipe, plan, capture))
            else:
                runs.append(pipe.run(captured, target))
            if not keep_run:
                runs[-1] = runs[-1].released()
        result_type = BatchResult if is_batch else CompressionResult
        result = result_type.from_runs(model, prompts, runs, pipe, keep_run=keep_run)
        if capture.trim and model.device.type == "cpu":
            del runs
            trim_memory()
        return result


def _checked_plans(
    model: Any, prompts: Sequence[Any], prefills: Sequence[Any], pipe: Pipeline, budget: Budget
) -> list[BudgetPlan]:
    """The budget of each prompt in entries; rejects bad input before the model runs."""
    if not prompts:
        raise PromptError("compress takes a prompt or a list of at least one; got an empty list.")
    if not isinstance(prefills, list | tuple) or len(prefills) != len(prompts):
        raise CacheError(
            f"Give a list of one prefill per prompt, {len(prompts)}, or none; got "
            f"{type(prefills).__name__}."
        )
    plans = []
    for prompt, prefill in zip(prompts, prefills, strict=True):
        expect(prompt, Prompt, f"compress takes a list of Prompts or one {PROMPT}", PromptError)
        if prefill is None:
            plans.append(pipe.plan_for(model, prompt.spans, budget))
        else:
            check_prefill(model, prompt, prefill)
            plans.append(pipe.plan(prefill, budget))
    if len({id(prompt.tokenizer) for prompt in prompts}) != 1:
        raise PromptError(
            "The prompts of a batch must share one tokenizer object (or have none), which decodes "
            "all of their rows. Build them with the same tokenizer."
        )
    return plans


def check_prefill(model: Any, prompt: Prompt, prefill: Prefill) -> None:
    """Raise `CacheError` unless `prefill` is a result of `capture(model, prompt)`."""
    expect(prefill, Prefill, "prefill takes what gracekv.capture returns", CacheError)
    without_tail = prompt.without_tail()
    ids = without_tail.ids if prefill.token_ids is None else prefill.token_ids
    if prefill.spans != without_tail.spans or not torch.equal(ids, without_tail.ids):
        raise CacheError(
            f"The prefill belongs to another prompt: it has {prefill.spans}, the prompt has "
            f"{without_tail.spans}, or their ids differ. Use gracekv.capture(model, prompt)."
        )
    advice = "Use gracekv.capture(model, prompt) with the model that generates."
    check_same_model(prefill.fingerprint, model, "The prefill", advice)


def per_byte(model: Any, budget: Budget) -> bool:
    """Whether the default is an `-allocated` recipe, which chooses bits per entry.

    It is for budgets in bytes, and for ratios if the model computes in 16 bits, unless the head
    dimension is not a multiple of the group size. The model has passed `check_model`.
    """
    halves = budget.kind == "ratio" and cache_dtype(model).itemsize == 2
    counts = budget.kind == "kv_bytes" or halves
    return counts and head_sizes(model)[2] % AllocatedPrecision().group == 0


def chosen_pipeline(
    model: Any,
    budget: Budget,
    pipeline: str | Path | Pipeline | None,
    backend: str | Backend | None,
    prompts: Sequence[Any],
) -> Pipeline:
    """The pipeline by name or file, as given, or the default; with the backend, if given.

    Raises `ConfigError` for anything else, or if the prompts have different defaults.
    """
    if pipeline is None:
        by_byte = per_byte(model, budget)
        has_question = {getattr(prompt, "has_question", True) for prompt in prompts}
        if len(has_question) > 1:
            known, unknown = (recipes.default(question=x, per_byte=by_byte) for x in (True, False))
            raise ConfigError(
                f"Prompts with and without a question have different default recipes, {known!r} "
                f"and {unknown!r}. Name one: pipeline={unknown!r}, or compress them separately."
            )
        pipeline = Pipeline.default(question=has_question != {False}, per_byte=by_byte)
    elif isinstance(pipeline, str | Path):
        pipeline = load_pipeline(pipeline)
    takes = "pipeline takes the name of a recipe or file, or what Pipeline.from_dict returns"
    expect(pipeline, Pipeline, takes)
    if backend is None:
        return pipeline
    return dataclasses.replace(pipeline, backend=BACKENDS.parse(backend))
