"""`capture`: one standard forward pass, and everything that compression reads from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import CaptureMemoryError, PromptError
from gracekv.prefill.attention_patch import base_attention, input_device, patched_attention
from gracekv.prefill.base import Prefill
from gracekv.prefill.capture_memory import (
    CaptureSizes,
    check_memory_limit,
    checked_chunk,
    free_bytes,
    held_positions,
    is_out_of_memory,
    out_of_memory_message,
)
from gracekv.prefill.draft import draft
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.length_limits import check_prompt_length
from gracekv.prefill.needs import Needs
from gracekv.prefill.partial_attention import PartialAttention, rotations
from gracekv.prefill.projection import projected_norms, projection_norms
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.query_pass import QueryPass
from gracekv.prefill.reconstruction import reconstruction
from gracekv.prefill.recorder import Recorder
from gracekv.prefill.spans import Region
from gracekv.prefill.supported import check_model
from gracekv.prefill.surprisal import unlikelihood

EVERYTHING = Needs(
    prompt_samples=1024,
    context_samples=512,
    recent=4,
    later_queries=True,
    hidden_depths=frozenset({0.33, 0.5, 0.67, 0.75}),
    surprisal=True,
    head_outputs=True,
)
"""What `capture` keeps unless told less: all that the strategies with default fields read of one
pass, but for sums over all queries, which are made from queries when they are read. What runs the
model again (`reconstruction`, `draft`) is made only when asked for."""


@torch.no_grad()
def capture(
    model: Any,
    prompt: Prompt,
    needs: Needs | None = None,
    *,
    chunk: int | None = None,
    memory_limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
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
        chunk: tokens that run at once; default: all of a short prompt, else 1,024, fewer beyond
            32,768 tokens, since a mask of chunk times prompt is made. Larger ones are faster on
            some GPUs.
        memory_limit: most bytes of queries that are held; default: 256 MiB, or a quarter of keys
            and values if that is more. 0 holds only probes and windows and computes all others
            again when they are read.
        progress: called with the tokens done and the tokens in all after each chunk.

    Raises:
        UnsupportedModelError: the model breaks an assumption, has a sliding window that does not
            cover the prompt, or is in training mode.
        PromptError: `prompt` is not a `Prompt`, has ids outside the vocabulary, or a length at
            which transformers drops the cache.
        ConfigError: `chunk` or `memory_limit` cannot be.
        CaptureMemoryError: memory ran out; the model is as before.
        NonFiniteError: keys, values or queries hold NaN or infinity.

    Warns (`LengthWarning`) about a prompt longer than what the model was made for.
    """
    check_model(model)
    if not isinstance(prompt, Prompt):
        raise PromptError(
            f"capture takes one Prompt; got {type(prompt).__name__}. Build it with "
            f"Prompt.from_chat or Prompt.from_ids."
        )
    prompt = prompt.without_tail()
    embeddings = model.get_input_embeddings()
    if int(prompt.ids.max()) >= embeddings.num_embeddings:
        raise PromptError(
            f"The prompt holds token id {int(prompt.ids.max())}, the model knows "
            f"{embeddings.num_embeddings}. Use the tokenizer that belongs to the model."
        )
    check_prompt_length(model, prompt.spans.length)
    check_memory_limit(memory_limit)
    length, needs = prompt.spans.length, EVERYTHING if needs is None else needs
    size = checked_chunk(chunk, length, hasattr(model.get_decoder(), "rotary_emb"))
    sizes = CaptureSizes.of(model)
    held = held_positions(needs, prompt.spans, sizes, memory_limit)
    free = free_bytes(input_device(model))
    try:
        return _captured(model, prompt, needs, held, size, progress)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    # Not from the error, whose frames hold the tensors of the failed pass.
    raise CaptureMemoryError(out_of_memory_message(length, size, len(held), sizes, free))


def _captured(
    model: Any,
    prompt: Prompt,
    needs: Needs,
    held: Tensor,
    size: int,
    progress: Callable[[int, int], None] | None,
) -> Prefill:
    layers, device = list(model.get_decoder().layers), input_device(model)
    record = Recorder(prompt.spans, needs, held, len(layers))
    seconds: dict[str, float] = {}
    last, surprisal = _run(model, prompt, needs, record, size, seconds, progress)
    keys, values = ([x[i] for i in range(len(layers))] for x in (record.keys, record.values))
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
            by_layer = [record.outputs[layer] for layer in range(len(layers))]
            modules = [layer.self_attn.o_proj for layer in layers]
            groups = len(keys[0])
            # Layers of a sharded model lie on several devices; these few numbers go to the first.
            outputs = _stack(by_layer)
            projected = _stack(
                [projected_norms(m, x, groups) for m, x in zip(modules, by_layer, strict=True)]
            )
            weights = _stack(
                [projection_norms(m, x) for m, x in zip(modules, by_layer, strict=True)]
            )
    sums = [record.column_sums[layer] for layer in sorted(record.column_sums)]
    return Prefill(
        spans=prompt.spans,
        keys=tuple(keys),
        values=tuple(values),
        queries=tuple(record.queries[layer] for layer in range(len(layers))),
        query_positions=held,
        rope=record.rope(),
        scale=record.scale,
        hidden=record.hidden,
        surprisal=surprisal,
        head_outputs=outputs,
        projected_norms=projected,
        projection_norms=weights,
        reconstruction=repeated,
        draft=drafted,
        column_sums=_stack(sums) if sums else None,
        query_moments=record.query_moments(),
        query_source=QueryPass(model),
        logits=last,
        token_ids=prompt.ids,
        fingerprint=fingerprint(model, prompt.tokenizer),
        seconds=seconds,
    )


def _run(
    model: Any,
    prompt: Prompt,
    needs: Needs,
    record: Recorder,
    size: int,
    seconds: dict[str, float],
    progress: Callable[[int, int], None] | None,
) -> tuple[Tensor, Tensor | None]:
    """Fill `record`, chunk by chunk; the last logits [vocabulary], and the surprisal [T]."""
    length, device = prompt.spans.length, input_device(model)
    head, vocabulary = model.get_output_embeddings(), model.config.vocab_size
    ids, parts = prompt.ids[None].to(device), []
    whole = torch.arange(length, device=device)[None]
    output: Any = None
    with ExitStack() as undo:
        base = base_attention(model)
        undo.enter_context(patched_attention(model, record.wrap))
        undo.enter_context(record.hooks(model))
        if size < length:
            undo.enter_context(rotations(model.get_decoder(), lambda own, x: own(x, whole)))
        for first in range(0, length, size):
            stop = min(first + size, length)
            options: dict[str, Any] = {}
            partial = None
            if size < length:
                partial = PartialAttention(base, torch.arange(first, stop))
                options["position_ids"] = whole[:, first:stop]
            record.begin(Region(first, stop), partial)
            with _clock(seconds, "prefill", device):
                output = model(
                    input_ids=ids[:, first:stop], use_cache=False, logits_to_keep=1, **options
                )
            if needs.surprisal:
                with _clock(seconds, "surprisal", device):
                    following = prompt.ids[first + 1 : stop + 1]
                    rows = record.final[: len(following)]
                    record.final = None
                    if len(following):
                        parts.append(unlikelihood(rows, head, following, vocabulary))
            if progress is not None:
                progress(stop, length)
    if needs.column_sums or needs.query_moments is not None:
        seconds["query_sums"] = record.seconds
        seconds["prefill"] -= record.seconds
    surprisal = torch.nn.functional.pad(torch.cat(parts), (1, 0)) if needs.surprisal else None
    return output.logits[0, -1], surprisal


def _stack(tensors: list[Tensor]) -> Tensor:
    return torch.stack([x.to(tensors[0].device) for x in tensors])


@contextmanager
def _clock(seconds: dict[str, float], part: str, device: torch.device) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start
