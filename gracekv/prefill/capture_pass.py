"""The pass of a capture: the model runs chunk by chunk, and a recorder keeps what is needed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from gracekv.prefill.draft import draft
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.model_layers import (
    attention_module,
    compressed_layers,
    has_rope,
    model_layers,
    output_projection,
    rotary_positions,
    rotating,
    rotation_kind,
    text_config,
)
from gracekv.prefill.needs import Needs
from gracekv.prefill.options import CaptureOptions
from gracekv.prefill.partial_attention import PartialAttention, rotations
from gracekv.prefill.past import ADDED, Past, reflected
from gracekv.prefill.projection import projected_norms, projection_norms, written_norms
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.query_pass import QueryPass
from gracekv.prefill.reconstruction import reconstruction
from gracekv.prefill.recorder import Recorder, no_rotation
from gracekv.prefill.spans import Region
from gracekv.prefill.stock_layers import StockLayers
from gracekv.prefill.surprisal import unlikelihood


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
    decoder = model.get_decoder()
    projections = [output_projection(attention_module(decoder.layers[x.number])) for x in chosen]
    record = Recorder(prompt.spans, needs, held, chosen)
    seconds: dict[str, float] = {}
    others = StockLayers(
        model, () if past is None else past.kept, 0 if past is None else past.length
    )
    last, surprisal = _run(model, prompt, past, needs, record, others, size, seconds, progress)
    keys, values = ([x[i] for i in range(len(chosen))] for x in (record.keys, record.values))
    repeated = drafted = None
    if needs.reconstruction:
        with _clock(seconds, "reconstruction", device):
            repeated = reconstruction(model, prompt, keys, values, device)
    if needs.draft:
        with _clock(seconds, "draft", device):
            drafted = draft(model, prompt, keys, values, last, needs.draft, device)
    outputs = projected = weights = None
    if needs.head_outputs:
        with _clock(seconds, "projections", device):
            by_layer = [record.outputs[layer] for layer in range(len(chosen))]
            groups = len(keys[0])
            # Layers of a sharded model lie on several devices; these few numbers go to the first.
            outputs = _stack(by_layer)
            projected = _stack(
                [projected_norms(m, x, groups) for m, x in zip(projections, by_layer, strict=True)]
            )
            weights = _stack(
                [projection_norms(m, x) for m, x in zip(projections, by_layer, strict=True)]
            )
    written = None
    if needs.written_norms:
        with _clock(seconds, "projections", device):
            heads = record.queries[0].shape[0]
            written = _stack(
                [
                    written_norms(projection, x, heads)
                    for projection, x in zip(projections, values, strict=True)
                ]
            )
    sums = [record.column_sums[layer] for layer in sorted(record.column_sums)]
    return Prefill(
        spans=prompt.spans,
        keys=tuple(keys),
        values=tuple(values),
        queries=tuple(record.queries[layer] for layer in range(len(chosen))),
        query_positions=held,
        rope=record.rope(),
        scale=record.scale,
        unrotated=record.unrotated(),
        softcap=record.softcap,
        sink_logits=tuple(record.sinks[layer] for layer in sorted(record.sinks)),
        added=0 if past is None else ADDED,
        kept=others.states,
        hidden={x: reflected(rows, prompt.spans.past) for x, rows in record.hidden.items()},
        surprisal=surprisal,
        head_outputs=outputs,
        projected_norms=projected,
        projection_norms=weights,
        written_norms=written,
        reconstruction=repeated,
        draft=drafted,
        column_sums=_stack(sums) if sums else None,
        query_moments=record.query_moments(),
        block_replays=record.block_replays(),
        query_source=None if others.states else QueryPass(model),
        logits=last,
        token_ids=prompt.ids,
        fingerprint=fingerprint(model, prompt.tokenizer),
        shard=head_shard(model),
        seconds=seconds,
    )


def _run(
    model: Any,
    prompt: Prompt,
    past: Past | None,
    needs: Needs,
    record: Recorder,
    others: StockLayers,
    size: int,
    seconds: dict[str, float],
    progress: Callable[[int, int], None] | None,
) -> tuple[Tensor, Tensor | None]:
    """Fill `record`, chunk by chunk; the last logits [vocabulary], and the surprisal [T]."""
    length, start, device = prompt.spans.length, prompt.spans.past, input_device(model)
    head, vocabulary = model.get_output_embeddings(), text_config(model).vocab_size
    ids, parts = prompt.ids[None].to(device), []
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
            with _clock(seconds, "prefill", device):
                output = model(input_ids=ids[:, first:stop], logits_to_keep=1, **options)
            others.read(length - stop)
            if needs.surprisal:
                with _clock(seconds, "surprisal", device):
                    following = prompt.ids[first + 1 : stop + 1]
                    rows = record.final[: len(following)]
                    record.final = None
                    if len(following):
                        parts.append(unlikelihood(rows, head, following, vocabulary))
            if progress is not None:
                progress(stop, length)
    if needs.sums_queries:
        seconds["query_sums"] = record.seconds
        seconds["prefill"] -= record.seconds
    surprisal = None
    if needs.surprisal:
        surprisal = torch.nn.functional.pad(torch.cat(parts), (start + 1, 0))
        surprisal = reflected(surprisal, start)
    return output.logits[0, -1], surprisal


def _rotation(model: Any, past: Past, places: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, P, d_rot] of the places of `past`."""
    if not has_rope(model):
        return no_rotation(past.places, places.device)
    rotation: tuple[Tensor, Tensor] = model.get_decoder().rotary_emb(
        past.keys[0], rotary_positions(model, places), *rotation_kind(model)
    )
    return rotation


def _stack(tensors: list[Tensor]) -> Tensor:
    return torch.stack([x.to(tensors[0].device) for x in tensors])


@contextmanager
def _clock(seconds: dict[str, float], part: str, device: torch.device) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start
