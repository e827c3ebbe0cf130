"""`compress`: from a model and a prompt to a compressed cache."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from gracekv.allocate import Budget
from gracekv.backends import BACKENDS, Backend
from gracekv.errors import BudgetError, ConfigError
from gracekv.hf.attention import attach
from gracekv.hf.cache import GraceCache
from gracekv.hf.result import CompressionResult
from gracekv.prefill.capture import capture
from gracekv.prefill.prompt import Prompt

if TYPE_CHECKING:
    from gracekv.pipeline import Pipeline


def compress(
    model: Any,
    prompt: Prompt,
    *,
    ratio: int | float | str | Fraction | None = None,
    entries_per_head: int | None = None,
    kv_bytes: int | str | None = None,
    pipeline: str | Pipeline = "gracekv",
    backend: str | Backend | None = None,
) -> CompressionResult:
    """Prefill once, compress the context's cache to a budget, and be ready to generate.

    The model is attached (see `gracekv.hf.attach`) and stays so, unless this raises.

    Args:
        model: a transformers causal language model of a tested family, in evaluation mode.
        prompt: one sequence; only its context is compressed.
        ratio: how many times fewer entries the context keeps, at least 1.
        entries_per_head: entries per KV head and layer on average, instead of a ratio.
        kv_bytes: bytes of the context's keys and values, or text such as "64MiB", instead.
        pipeline: the name of a pipeline, or one of your own.
        backend: who attends while decoding; default: the pipeline's.

    Raises:
        BudgetError: not exactly one budget is given, or it is too small for the prompt.
        UnsupportedModelError, PromptError, NonFiniteError: see `capture`.
    """
    budget = _budget(ratio, entries_per_head, kv_bytes)
    pipe = _pipeline(pipeline)
    reader = pipe.backend if backend is None else BACKENDS.parse(backend)
    prefill = capture(model, prompt, pipe.needs())
    run = pipe.run(prefill, budget)
    attach(model)
    cache = GraceCache(run.cache, reader)
    accounting = dataclasses.replace(run.accounting, backend_bytes=cache.held_bytes)
    return CompressionResult(model, prompt, dataclasses.replace(run, accounting=accounting), cache)


def _budget(
    ratio: int | float | str | Fraction | None,
    entries_per_head: int | None,
    kv_bytes: int | str | None,
) -> Budget:
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


def _pipeline(pipeline: str | Pipeline) -> Pipeline:
    from gracekv.pipeline import Pipeline

    if isinstance(pipeline, str):
        return Pipeline.named(pipeline)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(
            f"pipeline takes a name or a gracekv.pipeline.Pipeline; got {pipeline!r}."
        )
    return pipeline
