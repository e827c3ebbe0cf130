"""`capture`: one standard forward pass, and everything that compression reads from it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from gracekv.distributed.sharding import head_shard
from gracekv.errors import CaptureMemoryError, PromptError
from gracekv.prefill.attention_patch import base_attention, input_device, patched_attention
from gracekv.prefill.base import Prefill
from gracekv.prefill.capture_memory import (
    CaptureSizes,
    free_bytes,
    held_positions,
    is_out_of_memory,
    out_of_memory_message,
)
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.model_layers import (
    StockLayers,
    compressed_layers,
    final_logits,
    has_rope,
    model_layers,
    rotary_positions,
    rotating,
    rotation_kind,
    text_config,
)
from gracekv.prefill.needs import Needs
from gracekv.prefill.observations import Observations
from gracekv.prefill.observer import FinalRun, Observer
from gracekv.prefill.options import DEFAULTS, CaptureOptions
from gracekv.prefill.partial_attention import PartialAttention, rotations
from gracekv.prefill.passes import ModelPasses
from gracekv.prefill.past import Past
from gracekv.prefill.prompt import Prompt, Region
from gracekv.prefill.query_pass import QueryPass
from gracekv.prefill.recorder import Recorder, no_rotation
from gracekv.prefill.supported import check_model, check_needs, check_prompt_length
from gracekv.segment.curvature import Curvature
from gracekv.segment.surprisal import Surprisal
from gracekv.value.output_projection import OutputProjection

EVERYTHING = (
    Needs(prompt_samples=1024, context_samples=frozenset({512}), recent=4, later_queries=True)
    | Curvature((0.33, 0.5, 0.67, 0.75)).needs()
    | Needs.observed(Surprisal())
    | OutputProjection().needs()
)
"""What `capture` keeps unless told less: all that the strategies with default fields read of one
pass, but for sums over all queries, which are made from queries when they are read. What runs the
model again (`Reconstruction`, `Draft`), or multiplies all values (`WrittenNorms`), is made only
when asked for."""


@torch.no_grad()
def capture(
    model: Any,
    prompt: Prompt,
    needs: Needs | None = None,
    options: CaptureOptions = DEFAULTS,
) -> Prefill:
    """Run the model once over the prompt and keep what compression reads.

    A prompt of at most 2,048 tokens runs in one stock pass: its keys, values and last logits are
    those of `model(ids)`. A longer one runs in chunks, which attend to the keys and values of the
    chunks before, so that what the model's layers hold meanwhile does not grow with the prompt;
    the result is the same up to rounding. Temporary attention function and hooks are removed
    afterwards, or if the pass fails or is interrupted. While it runs, no other thread may use
    the model.

    Queries are the large part of what can be captured, H/(2G) times keys and values together. Those
    of known positions (direct probes, observation windows, evenly spaced samples) are held. Where
    positions known only later are needed, too, all queries are held if they take at most
    `memory_limit` bytes; else `Prefill.with_queries` runs the tokens of those positions once more.

    Args:
        model: a transformers causal language model of a tested family, in evaluation mode, with
            "sdpa" or "eager" attention.
        prompt: one sequence; without a question it is read up to the token after the context.
        needs: what to keep beyond keys and values; default: `EVERYTHING`.
        options: how it runs.

    Raises:
        UnsupportedModelError: the model breaks an assumption, has a sliding window that does not
            cover the prompt, or is in training mode.
        PromptError: `prompt` is not a `Prompt`, has ids outside the vocabulary, is longer than
            what the model was made for, or has a length at which transformers drops the cache.
        ObserverError: an observer reads what this model cannot give; before it runs.
        CaptureMemoryError: memory ran out; the model is as before.
        NonFiniteError: keys, values or queries hold NaN or infinity.

    Warns (`LengthWarning`) where little room is left before a length at which the cache ends.
    """
    check_model(model)
    if not isinstance(prompt, Prompt):
        raise PromptError(
            f"capture takes one Prompt; got {type(prompt).__name__}. Build it with "
            f"Prompt.from_chat or Prompt.from_ids."
        )
    prompt = prompt.without_tail()
    check_prompt_length(model, prompt.spans.length, beyond_positions=options.beyond_positions)
    needs = EVERYTHING if needs is None else needs
    check_needs(model, needs)
    return run_capture(model, prompt, None, needs, options)


@torch.no_grad()
def capture_passage(
    model: Any,
    prompt: Prompt,
    past: Past,
    needs: Needs,
    options: CaptureOptions = DEFAULTS,
) -> Prefill:
    """As `capture`, of a passage that follows what was compressed before.

    The passage is read once, over the entries that are there, at its true positions. In the
    prefill, positions count places: first those of `past`, then the passage's tokens. Its `rope`
    has their rotations, its keys and queries the coordinates of `Past`.

    Args:
        model: as for `capture`; not in use by another thread.
        prompt: `past.places` ids that are not read, then the passage's.
        past: what it follows.
        needs: what to keep.
        options: as for `capture`; `progress` counts the places of `past` as done.

    Raises what `capture` raises, and `ObserverError` for needs that run the model a second time.
    """
    check_needs(model, needs, passage=True)
    return run_capture(model, prompt, past, needs, options)


def run_capture(
    model: Any,
    prompt: Prompt,
    past: Past | None,
    needs: Needs,
    options: CaptureOptions,
) -> Prefill:
    """What `capture` returns, or with `past` `capture_passage`, whose arguments these are.

    Raises `PromptError` for ids outside the vocabulary, `CaptureMemoryError` if memory ran out, and
    what else `capture` raises.
    """
    embeddings = model.get_input_embeddings()
    if int(prompt.ids.max()) >= embeddings.num_embeddings:
        raise PromptError(
            f"The prompt holds token id {int(prompt.ids.max())}, the model knows "
            f"{embeddings.num_embeddings}. Use the tokenizer that belongs to the model."
        )
    length = prompt.spans.length
    runs_in_parts = has_rope(model) or rotating(model_layers(model)) == "none"
    size = options.chunk_of(length, splits=runs_in_parts)
    sizes = CaptureSizes.of(model)
    held = held_positions(needs, prompt.spans, sizes, options.memory_limit)
    free = free_bytes(input_device(model))
    try:
        return _captured(model, prompt, past, needs, held, size, options.progress)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    # Not from the error, whose frames hold the tensors of the failed pass.
    raise CaptureMemoryError(out_of_memory_message(length, size, len(held), sizes, free))


def _captured(
    model: Any,
    prompt: Prompt,
    past: Past | None,
    needs: Needs,
    held: Tensor,
    size: int,
    progress: Callable[[int, int], None] | None,
) -> Prefill:
    chosen, device = compressed_layers(model), input_device(model)
    observations = Observations(needs.observers, len(chosen), prompt.spans)
    record = Recorder(prompt.spans, observations, held, chosen)
    before = () if past is None else past.kept
    others = StockLayers(model, before, 0 if past is None else past.length)
    taken, last = _run(model, prompt, past, observations, record, others, size, progress)
    keys, values = (tuple(x[i] for i in range(len(chosen))) for x in (record.keys, record.values))
    passes = None
    if observations.reads("passes"):
        passes = ModelPasses(model, prompt, keys, values, record.rope_of, last)
    observed = observations.results(device, passes)
    return Prefill(
        spans=prompt.spans,
        keys=keys,
        values=values,
        queries=tuple(record.queries[layer] for layer in range(len(chosen))),
        query_positions=held,
        rope=record.rope(),
        scale=record.scale,
        unrotated=record.unrotated(),
        softcap=record.softcap,
        sink_logits=tuple(record.sinks[layer] for layer in sorted(record.sinks)),
        kept=others.states,
        observed=observed,
        query_source=None if others.states else QueryPass(model),
        logits=last,
        token_ids=prompt.ids,
        fingerprint=fingerprint(model, prompt.tokenizer),
        shard=head_shard(model),
        seconds={"prefill": taken, **dict[str | Observer, float](observations.seconds.items())},
    )


def _run(
    model: Any,
    prompt: Prompt,
    past: Past | None,
    observations: Observations,
    record: Recorder,
    others: StockLayers,
    size: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[float, Tensor]:
    """Fill `record`, chunk by chunk; seconds without the observers', and the last logits [V]."""
    length, start, device = prompt.spans.length, prompt.spans.past, input_device(model)
    head, vocabulary = model.get_output_embeddings(), text_config(model).vocab_size
    factor, cap = final_logits(model)
    ids, seconds = prompt.ids[None].to(device), 0.0
    places = whole = torch.arange(length, device=device)[None]
    if past is not None:
        whole = torch.where(places < start, places, places - start + past.length)
    edges = others.edges(start, length, size)
    in_parts = len(edges) > 2 or past is not None
    output: Any = None
    with ExitStack() as undo:
        base = base_attention(model)
        undo.enter_context(patched_attention(model, record.wrap))
        undo.enter_context(record.hooks(model))
        if in_parts and has_rope(model):
            every = rotary_positions(model, whole)
            undo.enter_context(rotations(model.get_decoder(), lambda own, x: own(x, every)))
        if past is not None:
            record.follow(past, _rotation(model, past, places[:, :start]))
        for first, stop in itertools.pairwise(edges):
            options = others.options()
            partial = None
            if in_parts:
                partial = PartialAttention(base, torch.arange(first, stop))
                options["position_ids"] = places[:, first:stop]
            record.begin(Region(first, stop), partial)
            started = time.perf_counter()
            output = model(input_ids=ids[:, first:stop], logits_to_keep=1, **options)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds += time.perf_counter() - started
            others.read(length - stop)
            following = prompt.ids[first + 1 : stop + 1]
            if observations.reads("final") and len(following):
                rows = record.final[: len(following)] * factor
                record.final = None
                observations.add_final(FinalRun(first, rows, following, head, vocabulary, cap))
            if progress is not None:
                progress(stop, length)
    return seconds - observations.running_seconds, output.logits[0, -1]


def _rotation(model: Any, past: Past, places: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, P, d_rot] of the places of `past`."""
    if not has_rope(model):
        return no_rotation(past.places, places.device)
    rotation: tuple[Tensor, Tensor] = model.get_decoder().rotary_emb(
        past.keys[0], rotary_positions(model, places), *rotation_kind(model)
    )
    return rotation
