"""A compressed context that goes on: a further passage, read over what is packed already."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate import Budget, BudgetPlan
from gracekv.cache import Accounting, CompressedCache, Timings, WidthShare
from gracekv.cache.base import RaggedCache, RaggedLayer
from gracekv.errors import CacheError
from gracekv.hf.budgets import check_budget
from gracekv.pipeline import Pipeline
from gracekv.prefill import PromptSpans
from gracekv.prefill.capture import capture_passage
from gracekv.prefill.kept import bytes_by_kind
from gracekv.prefill.length_limits import check_prompt_length, longest_sequence
from gracekv.prefill.model_layers import text_config
from gracekv.prefill.past import Past
from gracekv.prefill.prompt import Prompt
from gracekv.ragged import offsets
from gracekv.run import Run


def extended_run(
    model: Any,
    before: Prompt,
    run: Run,
    pipeline: Pipeline,
    passage: str | Tensor | Sequence[int],
    budget: Budget,
    *,
    chunk: int | None,
    memory_limit: int | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[Prompt, Run]:
    """The prompt that goes on with `passage`, and `run` with its entries behind those packed.

    Args:
        model: as for `capture`.
        before: what was compressed.
        run: what the pipeline made of it.
        pipeline: compresses the passage.
        passage: text, or token ids [n].

    The other arguments and errors are those of `CompressionResult.extend`; `CacheError` also if the
    model caps its logits.
    """
    old, prompt = run.cache, before.extended(passage)
    old_layers = _unquantised(old, pipeline)
    read = prompt.without_tail()
    _check_length(model, before.without_tail().spans.length, read.spans.length)
    if getattr(text_config(model), "attn_logit_softcapping", None) is not None:
        raise CacheError(
            f"{type(model).__name__} caps its attention logits, and a cap would count the "
            f"multiplicities of what is packed. Compress the whole text anew."
        )
    past = Past.padded([_heads(layer) for layer in old_layers], old.length, old.kept)
    # A context that was not followed by anything has a last token without an entry.
    last = before.spans.context_end - old.length
    ids = torch.cat([read.ids.new_zeros(past.places), read.ids[old.length :]])
    end = len(ids) - (read.spans.length - read.spans.context_end)
    spans = PromptSpans(past.places + last, end, end, len(ids), past=past.places)
    passage_prompt = dataclasses.replace(read, ids=ids, spans=spans)
    check_budget(model, passage_prompt, pipeline, budget)
    prefill = capture_passage(
        model,
        passage_prompt,
        past,
        pipeline.needs(),
        chunk=chunk,
        memory_limit=memory_limit,
        progress=progress,
    )
    dim = old_layers[0].dim
    if budget.kind == "kv_bytes":
        # The prefill's entries have the coordinates of `Past`, too.
        budget = Budget("kv_bytes", budget.amount * Fraction(prefill.head_dim, dim))
    return prompt, _joined(run, pipeline.run(prefill, budget), past.places, pipeline)


def _unquantised(cache: CompressedCache, pipeline: Pipeline) -> list[RaggedLayer]:
    """The layers of `cache`; raises `CacheError` if it or `pipeline` is quantised."""
    layers = [layer for layer in cache.layers if isinstance(layer, RaggedLayer)]
    if len(layers) < len(cache.layers) or pipeline.precision.name != "full":
        raise CacheError(
            "A cache with quantised entries cannot be extended yet. Compress and extend with "
            "precision 'full', or compress the whole text anew."
        )
    return layers


def _heads(layer: RaggedLayer) -> list[tuple[Tensor, Tensor, Tensor]]:
    heads = (layer.head(g) for g in range(layer.heads))
    return [(keys, values, log_m) for keys, values, _, log_m in heads]


def _check_length(model: Any, before: int, length: int) -> None:
    """Raise `CacheError` if the cache of `before` tokens cannot grow to `length`; see `capture`."""
    bound = longest_sequence(model, before)
    if bound is not None and length > bound[0]:
        raise CacheError(
            f"With the passage the prompt has {length} tokens and passes a length of {bound[0]}, "
            f"where {type(model).__name__} no longer fits its cache: {bound[1]}. Extend by "
            f"{max(0, bound[0] - before)} tokens at most, or compress the whole text anew."
        )
    check_prompt_length(model, length)


def _joined(before: Run, run: Run, places: int, pipeline: Pipeline) -> Run:
    """The entries of `before`, bit for bit, and behind them in each head those of the passage."""
    old = before.cache
    layers = tuple(
        _joined_layer(one, other, places, old.length)
        for one, other in zip(
            _unquantised(old, pipeline), _unquantised(run.cache, pipeline), strict=True
        )
    )
    length = run.cache.length - places + old.length
    packed = RaggedCache(layers, length, kept=run.cache.kept)
    plans, kept = (before.plan, run.plan), (before.accounting, run.accounting)
    plan = BudgetPlan(
        run.plan.layers,
        run.plan.heads,
        sum(x.context for x in plans),
        sum(x.total for x in plans),
        run.plan.recent,
    )
    layer = layers[0]
    full = len(layers) * layer.heads * packed.length * 2 * layer.keys[:1].nbytes
    bounds = [x.bound for x in kept if x.bound is not None]
    accounting = Accounting(
        budget=plan.total,
        spent=sum(x.spent for x in kept),
        floor_spent=sum(x.floor_spent for x in kept),
        recent=plan.recent,
        entries=kept[0].entries + kept[1].entries,
        bytes=packed.kv_bytes,
        metadata_bytes=packed.metadata_bytes,
        full_bytes=full,
        utility=sum(x.utility for x in kept),
        bound=sum(bounds) if len(bounds) == len(kept) else None,
        widths=WidthShare.of(packed),
        kept_bytes=bytes_by_kind(packed.kept),
    )
    seconds = before.timings.as_dict()
    added = run.timings.as_dict()
    timings = Timings(**{stage: seconds[stage] + added[stage] for stage in seconds})
    return Run(plan, packed, accounting, timings)


def _joined_layer(old: RaggedLayer, new: RaggedLayer, places: int, length: int) -> RaggedLayer:
    """Per head the entries of `old`, then those of `new` after the `places` that stand for them."""
    dim, parts = old.keys.shape[1], []
    for g in range(old.heads):
        keys, values, positions, log_m = (x[places:] for x in new.head(g))
        added = (keys[:, :dim], values[:, :dim], positions + (length - places), log_m)
        parts += [old.head(g), added]
    keys, values, positions, log_m = (torch.cat(column) for column in zip(*parts, strict=True))
    bounds = offsets(old.lengths + new.lengths - places)
    return RaggedLayer(keys, values, positions, log_m, bounds)
