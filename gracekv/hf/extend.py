"""Extends a compressed context by a passage, which is read over the packed entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate import Budget
from gracekv.cache import Accounting, CompressedCache, RaggedEntries, Timings, dequantised
from gracekv.cache.closing import free_reach, known_reach, oldest_position, with_closed_gaps
from gracekv.cache.joining import joined_cache, joined_scores, past_of
from gracekv.decode import Limit
from gracekv.decode.cut import entries_within
from gracekv.distributed.sharding import WHOLE, HeadShard, head_shard
from gracekv.errors import CacheError, expect
from gracekv.hf.base_result import BaseResult
from gracekv.hf.capture import prefilled_run
from gracekv.pipeline.run import Run, physical_sizes
from gracekv.prefill import PromptSpans
from gracekv.prefill.fingerprint import check_same_model
from gracekv.prefill.length_limits import check_prompt_length, longest_sequence
from gracekv.prefill.model_layers import text_config
from gracekv.prefill.options import CaptureOptions
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.supported import check_model


def extended_run(
    result: BaseResult,
    passage: str | Tensor | Sequence[int],
    budget: Budget,
    capture: CaptureOptions,
) -> tuple[Prompt, Run]:
    """The prompt extended by `passage`, and the run with its entries behind the packed ones.

    Args:
        result: one prompt's result; its pipeline compresses the passage.
        passage: text, or token ids [n].

    The other arguments and errors are those of `CompressionResult.extend`; `CacheError` also as
    `check_extends` raises it.
    """
    expect(capture, CaptureOptions, "extend takes capture=gracekv.CaptureOptions(...)")
    check_model(result.model)
    model, pipeline, source, run = result.model, result.pipeline, result.prompts[0], result.runs[0]
    check_same_model(
        run.fingerprint, model, "The compressed context", "Compress the whole text with this model."
    )
    old, prompt = run.cache, source.extended(passage)
    without_tail = prompt.without_tail()
    old_length, length = source.without_tail().spans.length, without_tail.spans.length
    bound = longest_sequence(model, old_length)
    if bound is not None and length > bound[0]:
        raise CacheError(
            f"With this passage the prompt would have {length} tokens. {type(model).__name__} "
            f"cannot use this cache beyond {bound[0]} tokens: {bound[1]}. Extend by "
            f"{max(0, bound[0] - old_length)} tokens at most, or compress the whole text again."
        )
    first = oldest_position(old)
    check_prompt_length(model, length - first, beyond_positions=capture.beyond_positions)
    check_extends(model)
    shard = head_shard(model)
    facts, entries = (prompt.ids.tolist(), prompt.spans), run.accounting.entries.tolist()
    limits = capture.chunk, capture.memory_limit
    shard.agree(prompt=facts, pipeline=pipeline, budget=budget, result=entries, limits=limits)
    past = past_of(old, shard)
    # If nothing followed the context, its last token has no entry.
    last = source.spans.context_end - old.length
    ids = torch.cat([without_tail.ids.new_zeros(past.places), without_tail.ids[old.length :]])
    end = len(ids) - (without_tail.spans.length - without_tail.spans.context_end)
    spans = PromptSpans(past.places + last, end, end, len(ids), past=past.places)
    passage_prompt = dataclasses.replace(without_tail, ids=ids, spans=spans)
    plan = pipeline.plan_for(model, passage_prompt.spans, budget)
    new_run = prefilled_run(model, passage_prompt, past, pipeline, plan, capture)
    return prompt, _join_runs(run, new_run, past.places, shard)


def check_extends(model: Any) -> None:
    """Raise `CacheError` if the model cannot read a passage over packed entries.

    Models that cap attention logits or scale queries by position (Ministral 3) cannot.
    """
    config = text_config(model)
    caps = getattr(config, "attn_logit_softcapping", None) is not None
    scales = (getattr(config, "rope_parameters", None) or {}).get("llama_4_scaling_beta")
    why = "caps its attention logits, and a cap would count the multiplicities of packed entries"
    if not caps:
        why = "scales its queries by positions, which a passage over packed entries does not have"
    if caps or scales:
        raise CacheError(f"{type(model).__name__} {why}. Compress the whole text again.")


def _join_runs(old_run: Run, run: Run, places: int, shard: HeadShard) -> Run:
    """The entries of `old_run`, bit for bit, followed in each head by those of the passage."""
    old = old_run.cache
    packed = joined_cache(old, run.cache, places, shard)
    sizes = physical_sizes(packed, shard)
    counts = old_run.accounting, run.accounting
    total, context = Accounting.total(counts), old_run.plan.context + run.plan.context
    plan = dataclasses.replace(
        run.plan, context=context, total=total.budget, bytes=total.budget_bytes
    )
    spent = None if counts[1].spent_bytes is None else counts[0].spent_bytes
    # In 16 bits if either of them quantises.
    token_bytes = min(counts[0].full_bytes // old.length, counts[1].full_bytes // run.cache.length)
    accounting = dataclasses.replace(
        total,
        recent=plan.recent,
        entries=counts[0].entries + counts[1].entries,
        full_bytes=token_bytes * packed.length,
        spent_bytes=None if spent is None else spent + sizes["bytes"] - counts[0].bytes,
        **sizes,
    )
    seconds, added = old_run.timings.as_dict(), run.timings.as_dict()
    timings = Timings(**{stage: seconds[stage] + added[stage] for stage in seconds})
    scores = joined_scores([(x.cache, x.entry_scores()) for x in (old_run, run)], run.past)
    return Run(plan, packed, accounting, timings, old_run.fingerprint, scores=scores)


def limited_run(result: BaseResult, limit: Limit) -> Run:
    """The run of `result`, of one prompt, with its highest-scored entries that fit `limit`.

    The limit's window is left free. With closed positions, a head holds at most half of those that
    the model supports, which leaves the other half to what is read next.
    """
    run, cache = result.runs[0], dequantised(result.runs[0].cache)
    scores = run.entry_scores()
    reach = known_reach(result.model, limit.positions)
    masks = None if scores is None else entries_within(limit, cache, scores, known=reach)
    if scores is None or masks is None:
        return run
    kept_scores = tuple(layer[mask] for layer, mask in zip(scores, masks, strict=True))
    layers = tuple(map(RaggedEntries.where, cache.layers, masks))
    return _with_cache(run, dataclasses.replace(cache, layers=layers), kept_scores)


def closed_run(result: BaseResult, tokens: int) -> Run:
    """The run of `result`, of one prompt, with room for `tokens` before the model's last position.

    Gaps between entries are closed if less than a quarter of all positions would be left. Entries
    then take half of the positions, or fewer if `tokens` do not fit into the other half.
    """
    run = result.runs[0]
    made = with_closed_gaps(run.cache, result.model, tokens)
    return run if made is None else _with_cache(run, made, run.entry_scores())


def passage_sizes(model: Any, limit: Limit | None, tokens: int) -> list[int]:
    """Sizes of the parts in which a run of `tokens` is read: one, unless positions are closed."""
    most = None if limit is None else free_reach(model, limit.positions)
    count = 1 if most is None else -(-tokens // most)
    return [(tokens + part) // count for part in range(count)]


def extended_by(result: Any, limit: Limit | None, turns: Sequence[int], runs: Sequence[Any]) -> Any:
    """The result extended by runs of `turns`, ids [n].

    A run is the number of its tokens, and the options of `extend`.
    Before each, gaps are closed if the limit says so; after each, all entries are cut to it.
    """
    for tokens, how in runs:
        if limit is not None and limit.positions == "closed":
            # The token after the run is read, too.
            result = _of_run(result, closed_run(result, tokens + 1))
        result, turns = result.extend(turns[:tokens], **how), turns[tokens:]
        if limit is not None:
            result = _of_run(result, limited_run(result, limit))
    return result


def _of_run(result: Any, run: Run) -> Any:
    """A result like `result`, but of this run."""
    return type(result).from_runs(result.model, result.prompts, [run], result.pipeline)


def _with_cache(run: Run, packed: CompressedCache, scores: Any) -> Run:
    """The run with `packed` in place of its cache, and the scores of the entries in it."""
    old = run.accounting
    entries = old.entries - run.cache.entries() + packed.entries()
    spent = None if old.spent_bytes is None else old.spent_bytes + packed.kv_bytes - old.bytes
    sizes = {"entries": entries, "spent": int(entries.sum()), **physical_sizes(packed, WHOLE)}
    accounting = dataclasses.replace(old, spent_bytes=spent, **sizes)
    return Run(run.plan, packed, accounting, run.timings, run.fingerprint, scores=scores)
