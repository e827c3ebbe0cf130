"""Generates tokens and text from ids and a compressed cache, at once or as a stream."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from numbers import Integral
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import StoppingCriteriaList, TextIteratorStreamer

from gracekv.cache.closing import free_reach
from gracekv.decode import Limit
from gracekv.distributed.agreement import in_step
from gracekv.distributed.sharding import HeadShard
from gracekv.errors import CacheError, ConfigError, PromptError
from gracekv.hf import graph_replay
from gracekv.hf.attention import attach
from gracekv.hf.cache import GraceCache
from gracekv.hf.resumed_layer import is_resumed
from gracekv.prefill.cache_keyword import NAMES, cache_keyword
from gracekv.prefill.length_limits import check_continuation
from gracekv.prefill.model_layers import input_device
from gracekv.prefill.passes import end_ids

# Whether transformers can read new tokens in pieces over a cache.
_IN_PIECES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 21)


def padded_inputs(
    model: Any, rows: Sequence[Tensor], cache: GraceCache, tokenizer: Any
) -> dict[str, Tensor]:
    """ "input_ids" and "attention_mask" int64 [B, T] of sequences that start with cached tokens.

    Each row is padded on the left of its cached tokens to `cache.packed_length`, and on the left of
    the tokens that follow, whose number may differ.

    Args:
        model: the model; the tensors are on its device.
        rows: ids [T_i] of whole sequences, one per row of a new cache; or any number of rows over
            a cache of one prompt.
        cache: the cache of the tokens with which the rows begin.
        tokenizer: searched for a padding id.

    Raises `CacheError` if these numbers differ and the model has windows or states.
    """
    packed = cache.packed_length
    cached = [packed - padding for padding in cache.padding]
    if len(cached) == 1:
        cached *= len(rows)
    tails = {len(row) - count for row, count in zip(rows, cached, strict=True)}
    if cache.packed.other_layers and len(tails) > 1:
        raise CacheError(
            f"{sorted(tails)} tokens follow the compressed ones in the rows of this batch, and "
            f"padding there would take up places in sliding windows and states. Give the prompts "
            f"tails of the same length, or continue each alone: batch[0].generate()."
        )
    new = max(tails)
    ids = torch.full((len(rows), packed + new), padding_id(model, tokenizer))
    mask = torch.zeros_like(ids)
    for number, (row, count) in enumerate(zip(rows, cached, strict=True)):
        for part, end in ((row[:count], packed), (row[count:], packed + new)):
            ids[number, end - len(part) : end] = part
            mask[number, end - len(part) : end] = 1
    device = input_device(model)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def continue_ids(
    model: Any,
    rows: Sequence[Tensor],
    cache: GraceCache,
    tokenizer: Any,
    max_new_tokens: int,
    options: dict[str, Any],
    *,
    keep_cache: bool = False,
) -> Tensor:
    """int64 [B, new tokens] of `model.generate` over `cache`; greedy by default.

    The first arguments are those of `padded_inputs`; with `keep_cache`, `cache` afterwards holds
    all new tokens but the last. Raises `ConfigError` if `options` hold ids, a mask, a cache, or a
    length (in a `generation_config` or not), and if `max_new_tokens` is below 1; `CacheError` if
    the tokens exceed what the model's RoPE or sliding window allows; `RankError` if the processes
    of a sharded model were given different rows.
    """
    check_new_tokens(max_new_tokens)
    with in_step(model) as shard:
        _check_options(options)
        check_continuation(model, [len(row) for row in rows], max_new_tokens)
        shard.agree(ids=[row.tolist() for row in rows], max_new_tokens=max_new_tokens)
    attach(model)
    inputs = padded_inputs(model, rows, cache, tokenizer)
    # A recorded step supports neither a mask nor more rows than the cache has.
    new_tokens = inputs["attention_mask"][:, cache.packed_length :]
    even = len(rows) == len(cache.padding) and bool(new_tokens.all())
    replays = even and not keep_cache and shard.ranks == 1 and cache.limit is None
    # Repetition penalties also read masked places. Fill these with the row's first token, in front,
    # so that n-grams may span context and question.
    width = inputs["input_ids"].shape[1]
    filled = [functional.pad(row, (width - len(row), 0), value=int(row[0])) for row in rows]
    inputs["input_ids"] = torch.stack(filled).to(inputs["input_ids"])
    pieces = _pieces(model, cache.limit, width - int(cache.get_seq_length()))
    options = pieces | _with_defaults(model, tokenizer, options)
    for module in model.modules():
        # Models that read images would number tokens as the rows and images of their last call.
        if vars(module).get("rope_deltas") is not None:
            module.rope_deltas = None
    for layer in filter(is_resumed, cache.layers):
        # Assisted decoding turns it on and never off: plain steps would store all they read.
        layer.record_past = False
    with ExitStack() as stack:
        if replays and graph_replay.suits(model, cache, max_new_tokens, options):
            cache = stack.enter_context(graph_replay.replaying(model, cache, max_new_tokens))
        options[cache_keyword(model.forward)] = cache
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, **options)
    sequences: Tensor = output if isinstance(output, Tensor) else output.sequences
    return sequences[:, width:]


def _check_options(options: dict[str, Any]) -> None:
    """Raise `ConfigError` for ids, a mask, a cache, adapters or a length."""
    reserved = {"input_ids", "inputs_embeds", "attention_mask", "cache_implementation", *NAMES}
    if given := reserved & options.keys():
        raise ConfigError(
            f"Leave out {', '.join(sorted(given))}: ids, mask and cache are those of the "
            f"compressed prompt. For others call model.generate with result.new_cache()."
        )
    if options.get("adapter_names") is not None:
        raise ConfigError(
            "Leave out adapter_names: the cache was made with the adapters that are active. Choose "
            "others with model.set_adapter and compress again."
        )
    config = options.get("generation_config")
    for name in ("max_new_tokens", "max_length"):
        if (length := options.get(name, getattr(config, name, None))) is not None:
            raise ConfigError(
                f"Give the length as max_new_tokens, not in generation_config or as max_length: it "
                f"is checked before the model runs. Got {name}={length}."
            )


def _with_defaults(model: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `model.generate`, greedy unless they say otherwise."""
    defaults: dict[str, Any] = {}
    config = options.get("generation_config")
    if "do_sample" not in options and getattr(config, "do_sample", None) is None:
        # The model's own sampling settings would only raise warnings here.
        defaults = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if graph_replay.setting(model, options, "pad_token_id") is None:
        defaults["pad_token_id"] = padding_id(model, tokenizer)
    if graph_replay.setting(model, options, "cache_implementation") is not None:
        defaults["cache_implementation"] = None
    if graph_replay.setting(model, options, "stop_strings") is not None:
        defaults["tokenizer"] = tokenizer
    return defaults | options


def _pieces(model: Any, limit: Limit | None, ahead: int) -> dict[str, int]:
    """The option by which `ahead` tokens are read in pieces that `limit` has room for, if any."""
    if limit is None:
        return {}
    free = free_reach(model, limit.positions) if _IN_PIECES else None
    piece = limit.every if free is None else min(limit.every, free)
    if ahead > piece and not _IN_PIECES:
        raise ConfigError(
            f"transformers before 5.21 cannot read {ahead} tokens over a cache in pieces of "
            f"{piece}. Install a newer one, or use Limit(every={ahead})."
        )
    return {"prefill_chunk_size": piece} if ahead > piece else {}


def answer_ids(
    model: Any, ids: Tensor, cache: GraceCache, tokenizer: Any, most: int, options: dict[str, Any]
) -> Tensor:
    """int64 [n], the answer to `ids` [T], at most `most` tokens; `cache` then holds the turn.

    The token that ends the answer is only included if it is text.
    """
    rows = continue_ids(model, [ids], cache, tokenizer, most, options, keep_cache=True)
    answer = rows[0].cpu()
    known = end_ids(graph_replay.setting(model, options, "eos_token_id"))
    if not len(answer) or (last := int(answer[-1])) not in known:
        return answer
    marks = {*getattr(tokenizer, "get_added_vocab", dict)().values()}
    return answer if last not in marks and tokenizer.decode([last]).strip() else answer[:-1]


def check_one(model: Any, options: Any, names: Sequence[str], rule: str, advice: str) -> None:
    """Raise `ConfigError` if one of these settings asks for more than one sequence."""
    for name in names:
        if (count := graph_replay.setting(model, options, name)) not in (None, 1):
            raise ConfigError(f"{rule}; got {name}={count}. {advice}")


def check_new_tokens(count: Any) -> None:
    """Raise `ConfigError` unless this many tokens can be generated."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        raise ConfigError(f"max_new_tokens must be a whole number of at least 1; got {count!r}.")


def decode_rows(tokenizer: Any, rows: Tensor) -> list[str]:
    """Each of `rows` [B, n] as text; raises `PromptError` if there is no tokenizer."""
    if tokenizer is None:
        raise PromptError(
            "This prompt was made from ids without a tokenizer, so there is no text. Use "
            "generate_ids, or Prompt.from_ids(..., tokenizer=tokenizer)."
        )
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def padding_id(model: Any, tokenizer: Any) -> int:
    """The id that fills masked places; any id of the vocabulary would do."""
    config, pad = model.generation_config, getattr(tokenizer, "pad_token_id", None)
    ids = next((x for x in (config.pad_token_id, pad, config.eos_token_id) if x is not None), 0)
    return int(ids[0] if isinstance(ids, list) else ids)


def stream_text(
    tokenizer: Any,
    generate: Callable[[dict[str, Any]], object],
    options: dict[str, Any],
    shard: HeadShard,
) -> Iterator[str]:
    """Run `generate(options)` in a thread and yield its text as soon as words are complete.

    Args:
        tokenizer: for decoding.
        generate: calls `model.generate` for one row with the options that it is given.
        options: options of `model.generate`; a streamer and a stopping criterion are added.
        shard: the model's; all processes stop at the same token once one closes its iterator.

    Closing the iterator stops the generation at the next token. Errors of `generate` are raised
    from the iterator. Raises `ConfigError` if `options` have a streamer already.
    """
    if options.get("streamer") is not None:
        raise ConfigError("Give either stream=True, which returns an iterator, or a streamer.")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    closed, ended, failures = threading.Event(), threading.Event(), list[BaseException]()
    for device in filter(torch.is_autocast_enabled, ("cpu", "cuda", "xpu")):
        # A thread does not inherit it.
        generate = torch.autocast(device, torch.get_autocast_dtype(device))(generate)

    def is_closed(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        ends = shard.total(int(closed.is_set())) > 0
        return torch.full((len(ids),), ends, device=ids.device)

    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), is_closed])

    def work() -> None:
        try:
            generate({**options, "streamer": streamer, "stopping_criteria": criteria})
        except BaseException as error:
            failures.append(error)
        finally:
            streamer.on_finalized_text("", stream_end=True)
            ended.set()

    def pieces() -> Iterator[str]:
        thread, process = threading.Thread(target=work, daemon=True), os.getpid()

        def stop() -> None:
            closed.set()
            # The iterator may be collected in the thread itself; a forked process has no threads.
            if os.getpid() == process and threading.current_thread() is not thread:
                # After an interrupted join, Python would consider the thread ended.
                ended.wait()
                thread.join()

        thread.start()
        # At exit, Python would abort a thread that computes, and an iterator may still be open.
        atexit.register(stop)
        try:
            yield from (piece for piece in streamer if piece)
        finally:
            stop()
            if ended.is_set():
                atexit.unregister(stop)
        if failures:
            # Popped, since its traceback holds this frame and so, until a collection, the cache.
            raise failures.pop()

    return pieces()
