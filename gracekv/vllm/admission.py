"""Refuses unusable requests about contexts where vLLM takes them in, and tells the user why."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from gracekv.errors import StoreError
from gracekv.vllm.front import Front
from gracekv.vllm.header import PARAMETER, check_name
from gracekv.vllm.orders import FRONT, Compression, Deletion, Order, names_of, order_of
from gracekv.vllm.serving import has_store, refusal

_fronts: weakref.WeakKeyDictionary[Any, Front] = weakref.WeakKeyDictionary()
"""By vLLM's input processor."""


def wrap(owner: type[Any], around: Callable[..., Any]) -> None:
    """Replace the method of `owner` that `around` is named after by `around`; once only.

    `around` gets the stock method before its own arguments.
    """
    stock = getattr(owner, around.__name__)
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    setattr(owner, around.__name__, method)


def process_inputs(
    stock: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Of vLLM's `InputProcessor`: check contexts first."""
    found = check(self, params)
    made = stock(self, request_id, prompt, params, *args, **kwargs)
    if found is not None:
        with _as_bad_request():
            _put_ids(self, found, made, params)
    return made


def to_beam_search_params(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a request of the OpenAI-compatible server: refuse contexts.

    vLLM's beam search sends requests of its own, which do not name the context.
    """
    if PARAMETER in (self.kv_transfer_params or {}):
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(
            "vLLM's beam search cannot read a stored context. Leave use_beam_search out.",
            parameter="use_beam_search",
        )
    return stock(self, *args, **kwargs)


def process_outputs(stock: Any, self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Of vLLM's `OutputProcessor`: end requests that the scheduler refused with its reason.

    A client of the server gets an error with status 400 or 404. `LLM.generate` returns an output
    without tokens that finished by "error"; its `kv_transfer_params` hold the reason.
    """
    from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
    from vllm.v1.engine import FinishReason

    refused = []
    for output in outputs:
        reply = (output.kv_transfer_params or {}).get(PARAMETER)
        if not isinstance(reply, dict) or "status" not in reply:
            continue
        output.new_token_ids, output.new_logprobs = [], None
        output.finish_reason = FinishReason.ERROR
        kind = VLLMNotFoundError if reply["status"] == 404 else VLLMValidationError
        state = self.request_states.get(output.request_id)
        if state is not None and state.queue is not None:
            refused.append((state.queue, kind(reply["reason"])))
    made = stock(self, outputs, *args, **kwargs)
    for queue, error in refused:
        queue.put(error)
    return made


def check(processor: Any, params: Any) -> str | Order | None:
    """The name of the context that a request asks about, or its order; None if it has neither.

    Raises vLLM's error for bad requests (HTTP 400) with the `StoreError`'s text. Only the scheduler
    checks that the context exists, since it knows those that are in memory alone.
    """
    transfer = transfer_of(params)
    if PARAMETER not in transfer:
        return None
    with _as_bad_request():
        if not has_store(processor.vllm_config):
            raise StoreError(
                "The request names a context, and this engine has no store of contexts. Start it "
                "with gracekv.vllm.kv_transfer_config(store)."
            )
        if processor not in _fronts:
            _fronts[processor] = Front(processor.vllm_config)
        front = _fronts[processor]
        order = order_of(transfer[PARAMETER], recipe_of=lambda name: front.known(name)[0])
        allowed = {"n": 1, "logprobs": None, "prompt_logprobs": None}
        others = [x for x, value in allowed.items() if getattr(params, x, value) != value]
        if isinstance(order, Compression) and others:
            raise StoreError(f"A request that compresses takes no {' and no '.join(others)}.")
        found = check_name(transfer[PARAMETER]) if order is None else order
        for name in [found] if isinstance(found, str) else names_of(found):
            front.store.check_allowed(name, transfer)
        if isinstance(order, Deletion):
            front.orders.pop(order.name, None)
        return found


def _put_ids(processor: Any, found: str | Order, made: Any, params: Any) -> None:
    """Set the prompt of a question or a document; other orders do not read theirs."""
    front, ids = _fronts[processor], made.prompt_token_ids
    tokenizer = getattr(processor, "tokenizer", None)
    if isinstance(found, str):
        if tokenizer is not None and ids is not None:
            made.prompt_token_ids = front.question(found, ids, tokenizer)
        return
    made.params.max_tokens, made.params.min_tokens = 1, 0
    if isinstance(found, Compression):
        if ids is None or made.mm_features:
            raise StoreError("A document is text, without embeddings, images and sound.")
        made.prompt_token_ids, order = front.document(found, ids, tokenizer)
        known = {FRONT: {"start": order.start, "follow": asdict(order.follow)}}
        extra = {"kv_transfer_params": transfer_of(params) | known}
        made.params.extra_args = made.params.extra_args | extra


@contextlib.contextmanager
def _as_bad_request() -> Iterator[None]:
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    # One request must not end the engine for all others.
    except Exception as error:
        raise VLLMValidationError(refusal(error), parameter="kv_transfer_params") from error


def transfer_of(params: Any) -> dict[str, Any]:
    """The `kv_transfer_params` of sampling parameters, or {}."""
    extra = getattr(params, "extra_args", None) or {}
    transfer = extra.get("kv_transfer_params")
    return transfer if isinstance(transfer, dict) else {}
