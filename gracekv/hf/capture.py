"""`capture`: one standard forward pass, and everything that compression reads from it.

`prefilled_run` also compresses, without holding the full cache where the pipeline allows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from gracekv.allocate import BudgetPlan
from gracekv.distributed.agreement import in_step
from gracekv.distributed.sharding import check_works_sharded, head_shard
from gracekv.errors import ConfigError, LayerOrderError, PromptError, WholeCacheWarning, expect
from gracekv.hf.reading import Reading, layer_by_layer
from gracekv.pipeline.compression import Compression, Pipeline
from gracekv.pipeline.run import Run
from gracekv.prefill.base import Prefill
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.length_limits import check_passes, check_prompt_length
from gracekv.prefill.model_layers import cache_dtype, embeddings, head_sizes, runs_in_parts
from gracekv.prefill.needs import CaptureSizes, Needs, held_positions
from gracekv.prefill.observations import seconds_by_stage
from gracekv.prefill.options import (
    DEFAULTS,
    CaptureOptions,
    check_memory,
    chunk_room,
    free_bytes,
    is_out_of_memory,
    memory_error,
    trim_memory,
)
from gracekv.prefill.passes import ModelPasses, queries_again
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.spans import Past
from gracekv.prefill.supported import check_model, check_needs
from gracekv.segment.curvature import Curvature
from gracekv.segment.surprisal import Surprisal
from gracekv.value.output_projection import OutputProjection

_Result = TypeVar("_Result")

# Tokens of a chunk, and of the longest prompt that still runs in one pass: its keys and values are
# then those of the stock model, bit for bit. Layer by layer, 2,000 tokens in chunks of 512 take a
# tenth less time than in one pass, since less memory is returned to the system and allocated again.
_CHUNK, _ONE_PASS = 512, 2048
# On GPUs each pass has launch overhead: 32K tokens of a 7B model take 5.3 s in chunks of 512, 4.0 s
# in 2,048 and 3.6 s in 8,192, for 0.2 and 0.9 GiB more (ours, one H100). Passes beyond 16,384 would
# only raise the peak: smaller ones already fill any GPU.
_GPU_LEAST, _GPU_MOST = 512, 2**14

PROMPT = "Prompt (Prompt.from_chat or Prompt.from_ids makes one)"
"""The argument's name in error messages."""

EVERYTHING = (
    Needs(prompt_samples=1024, context_samples=frozenset({512}), recent=4, later_queries=True)
    | Curvature((0.33, 0.5, 0.67, 0.75)).needs()
    | Needs.observed(Surprisal())
    | OutputProjection().needs()
)
"""The default of `capture`: all that strategies with default fields read from one pass. Sums over
all queries are left out; they are computed from queries on demand. Observers that run the model
again (`Reconstruction`, `Draft`) or multiply all values (`WrittenNorms`) must be requested."""


def capture(
    model: Any, prompt: Prompt, needs: Needs | None = None, options: CaptureOptions = DEFAULTS
) -> Prefill:
    """Run the model once over the prompt and keep what compression reads.

    A prompt of at most 2,048 tokens runs in one stock pass: its keys, values and last logits are
    those of `model(ids)`. A longer prompt runs in chunks that attend to the keys and values of
    earlier chunks, so that activations do not grow with the prompt; the result is the same up to
    rounding. The temporary attention function and hooks are removed afterwards, even if the pass
    fails or is interrupted.

    All queries would take H/(2G) times the memory of keys and values. Queries at known positions
    (direct probes, observation windows, evenly spaced samples) are held. If a strategy also reads
    positions that are known only later, all queries are held if they take at most `memory_limit`
    bytes; otherwise `Prefill.with_queries` runs the tokens of those positions again.

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
            the model supports, or has a length at which transformers drops the cache.
        ObserverError: an observer reads something that this model cannot provide; raised before
            the model runs.
        CaptureMemoryError: memory ran out; the model is as before.
        NonFiniteError: keys, values or queries hold NaN or infinity.

    Warns (`LengthWarning`) if little room is left before a length at which the cache ends.
    """
    with in_step(model) as shard:
        check_model(model)
        expect(prompt, Prompt, f"capture takes one {PROMPT}", PromptError)
        expect(options, CaptureOptions, "capture's options are a gracekv.CaptureOptions")
        expect(needs, Needs | None, "capture's needs are a gracekv.prefill.Needs")
        facts = prompt.ids.tolist(), prompt.spans
        shard.agree(prompt=facts, options=(options.chunk, options.memory_limit))
        needs = EVERYTHING if needs is None else needs
        if needs.context_samples and not CaptureSizes.of(model).again:
            # A shorter window samples other positions, which this model cannot run again.
            needs = replace(needs, later_queries=True)
        return run_capture(model, prompt, None, needs, options)


def run_capture(
    model: Any, prompt: Prompt, past: Past | None, needs: Needs, options: CaptureOptions
) -> Prefill:
    """As `capture`; with `past`, captures a passage that follows packed entries.

    The passage is read over those entries, at its true positions: `prompt` has `past.places` ids
    that are not read, then those of the passage. Positions of the prefill count places: first those
    of `past`, then the tokens of the passage. Its `rope` has their rotations; its keys and queries
    have the additional coordinates of `Past`.

    Raises `PromptError`, `CaptureMemoryError` and the other errors of `capture`; for a passage,
    `ObserverError` if `needs` run the model again.
    """
    return _read(model, prompt, past, needs, options, _whole)


def chunk_size(
    options: CaptureOptions, length: int, *, splits: bool, by_layers: bool, room: int | None = None
) -> int:
    """The number of tokens of a prompt that run at once.

    Args:
        options: `chunk` is read.
        length: tokens of the prompt.
        splits: whether the model can run in parts.
        by_layers: whether all chunks go through one layer before the next.
        room: tokens whose activations a GPU has memory for, or None on a CPU.
    """
    size = options.chunk or (_CHUNK if room is None else max(_GPU_LEAST, min(room, _GPU_MOST)))
    whole = size if options.chunk or by_layers else max(size, _ONE_PASS)
    return size if length > whole and (options.chunk or splits) else length


@torch.no_grad()
def _read(
    model: Any,
    prompt: Prompt,
    past: Past | None,
    needs: Needs,
    options: CaptureOptions,
    read: Callable[[Reading], _Result],
    stays: float | None = None,
) -> _Result:
    """Check the prompt and call `read` with a `Reading`.

    If layers are read one by one, `stays` is the share of entries that is kept, for estimates of
    memory.

    Raises `CaptureMemoryError`, which says what would fit, if memory runs out.
    """
    if past is None:
        prompt = prompt.without_tail()
        beyond = options.beyond_positions
        check_prompt_length(model, prompt.spans.length, beyond_positions=beyond)
        if not beyond:
            check_passes(model, needs, prompt.spans)
    check_needs(model, needs, passage=past is not None)
    vocab = embeddings(model).num_embeddings
    if int(prompt.ids.max()) >= vocab:
        raise PromptError(
            f"The prompt holds token id {int(prompt.ids.max())}; the model knows {vocab} ids. Use "
            f"the tokenizer that belongs to the model."
        )
    kinds = (getattr(model.config, f"{x}_token_id", None) for x in ("image", "video", "audio"))
    if any(kind is not None and bool(prompt.ids.eq(kind).any()) for kind in kinds):
        raise PromptError(
            "The prompt has tokens that stand for images, videos or audio, which are unsupported. "
            "Use a prompt of text only."
        )
    length = prompt.spans.length
    sizes = CaptureSizes.of(model, stays)
    positions = held_positions(needs, prompt.spans, sizes, options.memory_limit)
    # This process has its own heads only.
    shard = head_shard(model)
    sizes = replace(sizes, kv=sizes.kv // shard.ranks, queries=sizes.queries // shard.ranks)
    gpus = {x.device for x in model.parameters() if x.device.type == "cuda"}
    free = room = None
    if model.device.type == "cuda":
        # Processes of one model run the same chunks, or none.
        free = -int(shard.maximum(torch.tensor(-sum(map(free_bytes, gpus)))))
        # Layers are spread over the GPUs; a chunk runs on one at a time.
        room = chunk_room(length, len(positions), sizes, free) // len(gpus)
    splits = runs_in_parts(model)
    size = chunk_size(options, length, splits=splits, by_layers=stays is not None, room=room)
    if free is not None:
        check_memory(length, size, len(positions), sizes, free)
    try:
        return read(Reading(model, prompt, past, needs, positions, size, options.progress))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    # Not within `except`: the error's frames hold the tensors of the failed pass.
    trim_memory()
    # The entries before a passage take memory whatever its length.
    entries = prompt.spans.past * sizes.kv * sizes.at_once
    remaining = max(0, sum(map(free_bytes, gpus or {model.device})) - int(entries))
    length -= prompt.spans.past
    opening = f"Capturing {length} tokens ran out of memory"
    raise memory_error(opening, length, size, len(positions), sizes, remaining)


def _whole(reading: Reading) -> Prefill:
    """Read all layers, chunk by chunk."""
    last, record = reading.by_chunks(), reading.record
    passes, fields = None, record.fields()
    if reading.observations.reads("passes"):
        passes = ModelPasses(reading.model, reading.prompt, record, last)
    observed = reading.observations.results(reading.device, passes)
    return Prefill(
        **fields,
        other_layers=reading.others.states,
        observed=observed,
        query_source=None if reading.others.states else partial(queries_again, reading.model),
        logits=last,
        token_ids=reading.prompt.ids,
        fingerprint=fingerprint(reading.model, reading.prompt.tokenizer),
        shard=reading.shard,
        seconds=reading.seconds,
    )


def prefilled_run(
    model: Any,
    prompt: Prompt,
    past: Past | None,
    pipeline: Pipeline,
    plan: BudgetPlan,
    options: CaptureOptions,
) -> Run:
    """Read `prompt` and compress it, layer by layer where `pipeline` allows it.

    Arguments and errors are those of `run_capture` and `Compression`; also `ConfigError` and
    `LayerOrderError` if `options.stream` is True and pipeline or model needs all layers at once.
    Warns (`WholeCacheWarning`) if the model cannot be read layer by layer, and reads it as a whole.
    """
    # A small budget shrinks the recent window.
    needs = replace(pipeline.needs(), recent=plan.recent)
    check_works_sharded(pipeline, head_shard(model))
    reason = pipeline.holds_all(plan, 2 * head_sizes(model)[2] * cache_dtype(model).itemsize)
    if options.stream and reason is not None:
        raise ConfigError(
            f"CaptureOptions(stream=True) reads and compresses layer by layer, and this pipeline "
            f"needs all layers at once: {reason}. Leave stream out."
        )
    if options.stream is not False and reason is None:
        compression = Compression(pipeline, plan)
        stays = plan.total / (plan.layers * plan.heads * plan.context)

        def read(reading: Reading) -> Any:
            try:
                return layer_by_layer(reading, each=compression.layer, trims=options.trim)
            except BaseException:
                # Free what was kept before free memory is measured.
                vars(compression).clear()
                raise

        try:
            others, seconds, identity = _read(model, prompt, past, needs, options, read, stays)
            return compression.finish(others, seconds_by_stage(seconds, needs), identity)
        except LayerOrderError as error:
            if options.stream:
                raise
            warnings.warn(str(error), WholeCacheWarning, stacklevel=3)
    prefill = [run_capture(model, prompt, past, needs, options)]
    # Nothing else holds the prefill, so a stage can free what later stages do not read.
    return Compression(pipeline, plan).run(prefill.pop())
