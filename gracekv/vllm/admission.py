"""Refuses unusable requests about contexts where vLLM receives them, and tells the user why.

`Front` checks documents and questions there; the other functions wrap vLLM's methods.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from gracekv.distributed.sharding import HeadShard, check_works_sharded
from gracekv.errors import BudgetError, ConfigError, StoreError, UnsupportedModelError
from gracekv.prefill.fingerprint import tokenizer_marks
from gracekv.prefill.supported import check_needs
from gracekv.recipes import DEFAULT_WITHOUT_QUESTION
from gracekv.vllm.header import EXACT, PARAMETER, TurnFormat, check_name
from gracekv.vllm.orders import FRONT, Compression, Deletion, Order, names_of, order_of
from gracekv.vllm.requests import continuing, passage, question_text, split_document
from gracekv.vllm.served_model import ServedModel
from gracekv.vllm.serving import has_store, open_store, refusal

_fronts: weakref.WeakKeyDictionary[Any, Front] = weakref.WeakKeyDictionary()
"""Fronts by vLLM's input processor."""


def wrap(owner: type[Any], around: Callable[..., Any]) -> None:
    """Replace the method of `owner` with the name of `around` by `around`, once.

    `around` gets the stock method as its first argument.
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
    """For vLLM's `InputProcessor`: check contexts first.

    Raises vLLM's error for bad requests with the `StoreError`'s text.
    """
    target = check(self, params)
    request = stock(self, request_id, prompt, params, *args, **kwargs)
    if target is not None:
        with _as_bad_request():
            if kwargs.get("resumable"):
                raise StoreError("A request about a context takes its whole prompt at once.")
            _put_ids(self, target, request, params)
    return request


def to_beam_search_params(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """For requests of the OpenAI-compatible server: refuse contexts.

    vLLM's beam search sends its own requests, which do not name the context.
    """
    if PARAMETER in (self.kv_transfer_params or {}):
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(
            "vLLM's beam search cannot read a stored context. Leave use_beam_search out.",
            parameter="use_beam_search",
        )
    return stock(self, *args, **kwargs)


def process_outputs(stock: Any, self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """For vLLM's `OutputProcessor`: end requests that the scheduler refused, with its reason.

    A client of the server gets an error with status 400 or 404. `LLM.generate` returns an output
    without tokens and with finish reason "error"; its `kv_transfer_params` hold the reason.
    """
    from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
    from vllm.v1.engine import FinishReason

    refused = []
    for output in outputs:
        reply = (output.kv_transfer_params or {}).get(PARAMETER)
        if not isinstance(reply, dict):
            continue
        if "status" not in reply:
            # The fronts of this engine, found by their tokenizer: another engine of the process
            # rarely shares it.
            for front in [x for of, x in _fronts.items() if of.tokenizer is self.tokenizer]:
                front.hear(reply)
            continue
        output.new_token_ids, output.new_logprobs = [], None
        output.finish_reason = FinishReason.ERROR
        kind = VLLMNotFoundError if reply["status"] == 404 else VLLMValidationError
        state = self.request_states.get(output.request_id)
        if state is not None and state.queue is not None:
            refused.append((state.queue, kind(reply["reason"])))
    result = stock(self, outputs, *args, **kwargs)
    for queue, error in refused:
        queue.put(error)
    return result


def check(processor: Any, params: Any) -> str | Order | None:
    """The name of the context that a request asks about, or its order; None if it has neither.

    Raises vLLM's error for bad requests (HTTP 400) with the `StoreError`'s text. Only the scheduler
    checks that the context exists, since it knows those that are only in memory.
    """
    if PARAMETER not in (transfer := transfer_of(params)):
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
        check_allowed = functools.partial(front.store.check_allowed, parameters=transfer)
        order = order_of(transfer[PARAMETER], None, lambda x: front.look_up(check_allowed(x))[0])
        scores = ("logprobs", "prompt_logprobs", "prompt_logprob_token_ids")
        allowed = {"n": 1, **dict.fromkeys(scores)}
        others = [x for x, value in allowed.items() if getattr(params, x, value) != value]
        if isinstance(order, Compression | Deletion) and others:
            no = " and no ".join(others)
            raise StoreError(f"A request that compresses or deletes takes no {no}.")
        target = check_name(transfer[PARAMETER]) if order is None else order
        for name in [target] if isinstance(target, str) else names_of(target):
            check_allowed(name)
        return target


def _put_ids(processor: Any, target: str | Order, request: Any, params: Any) -> None:
    """Set the prompt of a question or a document; other orders do not read theirs."""
    front, ids = _fronts[processor], request.prompt_token_ids
    tokenizer = None if transfer_of(params).get(EXACT) else getattr(processor, "tokenizer", None)
    # Places of embeddings and images would still be those of the original prompt.
    embeds = getattr(request, "prompt_embeds", None)
    no_text = ids is None or request.mm_features or embeds is not None
    if no_text and isinstance(target, str | Compression):
        raise StoreError("A request about a context is text only: no embeddings, images or audio.")
    if isinstance(target, str):
        # If only the scheduler knows the context, the prompt stays as it is.
        if tokenizer is not None and (follow := front.look_up(target)[1]):
            request.prompt_token_ids = ids = continuing(tokenizer, target, follow, ids)
            # vLLM checked the length before the separator was added.
            if len(ids) >= (limit := processor.vllm_config.model_config.max_model_len):
                raise StoreError(
                    f"With its separator the question has {len(ids):,} tokens, and this engine "
                    f"computes at most {limit - 1:,} in one prompt. Ask a shorter one."
                )
        return
    request.params.max_tokens, request.params.min_tokens = 1, 0
    if isinstance(target, Compression):
        request.prompt_token_ids, order = front.document(target, ids, tokenizer)
        facts = {FRONT: {"start": order.start, "follow": asdict(order.follow)}}
        extra = {"kv_transfer_params": transfer_of(params) | facts}
        request.params.extra_args = request.params.extra_args | extra


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
    transfer = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
    return transfer if isinstance(transfer, dict) else {}


# The most contexts whose continuation is remembered. Source: ours.
_REMEMBERED = 2**18


class Front:
    """Receives documents and questions.

    Args:
        vllm_config: vLLM's config.

    Attributes:
        store: only its headers are read here.
        formats: by name, recipe and continuation of the context that answers and of its successor;
            None for one that was deleted.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config, self.store = vllm_config, open_store(vllm_config)
        self.formats: OrderedDict[str, list[tuple[str, TurnFormat | None] | None]] = OrderedDict()
        self._format: TurnFormat | None = None
        self._served = functools.cache(lambda: ServedModel.of(vllm_config))

    def look_up(self, name: str) -> tuple[str, TurnFormat | None]:
        """A context's recipe and how requests continue it; the default and None if unknown here."""
        if name in self.formats:
            self.formats.move_to_end(name)
            if (own := self.formats[name][0]) is not None:
                return own
        with contextlib.suppress(StoreError):
            header = self.store.header(name)
            return header.recipe, header.continuation
        return DEFAULT_WITHOUT_QUESTION, None

    def hear(self, reply: dict[str, Any]) -> None:
        """Process a reply of the scheduler: a document was read, or a context was deleted."""
        name = reply.get("name", "")
        formats = self.formats.pop(name, None)
        self.store.forget(name)
        if formats is not None and reply["state"] == "compressing":
            self.formats[name] = formats[-1:]
        elif formats is not None and len(formats) > 1:
            self.formats[name] = [None, *formats[1:]]

    def document(
        self, order: Compression, ids: Sequence[int], tokenizer: Any
    ) -> tuple[list[int], Compression]:
        """The prompt with which a document is read, and the order with its start and continuation.

        Args:
            order: the client's order.
            ids: the request's prompt.
            tokenizer: the front's tokenizer, or None.

        Raises `StoreError` if the engine cannot compress the document.
        """
        tokens, start = list(ids), None
        if order.source is not None and tokenizer is not None:
            tokens = passage(tokenizer, ids)
        elif tokenizer is not None:
            tokens, start = split_document(tokenizer, ids)
        if start is not None:
            # Hashing a vocabulary takes half a second.
            self._format = self._format or TurnFormat(
                tokenizer=dict(tokenizer_marks(tokenizer)),
                question_text=question_text(tokenizer),
                template=True,
            )
            order = replace(order, start=start, follow=self._format)
        cache, limit = self._config.cache_config, self._config.model_config.max_model_len - 1
        if cache.num_gpu_blocks:
            # vLLM keeps one page for itself.
            limit = min(limit, (cache.num_gpu_blocks - 1) * cache.block_size)
        if len(tokens) + 1 > limit:
            raise StoreError(
                f"The document has {len(tokens):,} tokens, and this engine computes at most "
                f"{limit - 1:,} in one prompt. Send a shorter one, or serve with more pages "
                f"(--max-model-len, --kv-cache-memory-bytes)."
            )
        # One token is read after the context, since the last one of a prompt gets no entries.
        tokens += tokens[-1:]
        spans = order.spans(len(tokens))
        try:
            served = self._served()
            check_works_sharded(order.pipeline, HeadShard(ranks=served.ranks))
            order.pipeline.plan_for(served.model, spans, order.budget)
            if order.source is not None:
                check_needs(served.model, order.pipeline.needs(), passage=True)
        except (BudgetError, ConfigError, UnsupportedModelError) as error:
            raise StoreError(str(error)) from error
        follow = order.follow if order.source is None else self.look_up(order.source)[1]
        if follow is not None:
            old, new = self.look_up(order.name), (order.recipe, follow)
            self.formats[order.name] = [new] if old[1] is None else [old, new]
        if len(self.formats) > _REMEMBERED:
            self.formats.popitem(last=False)
        return tokens, order
