"""Refuses requests with unusable contexts where vLLM takes them in, with a message for the user."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from gracekv.errors import StoreError
from gracekv.vllm.equal_shares import check_prompt
from gracekv.vllm.header import PARAMETER, ContextHeader
from gracekv.vllm.serving import has_store, open_store, refusal
from gracekv.vllm.store import ContextStore

_stores: weakref.WeakKeyDictionary[Any, ContextStore] = weakref.WeakKeyDictionary()


def install(processor: type[Any]) -> None:
    """Let `processor.process_inputs` check contexts first; a second call changes nothing.

    Args:
        processor: vLLM's `InputProcessor`.
    """
    stock = processor.process_inputs
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        header = check(self, params)
        made = stock(self, request_id, prompt, params, *args, **kwargs)
        if header is not None and header.kind == "equal":
            with _as_bad_request():
                name = transfer_of(params)[PARAMETER]
                check_prompt(header, name, made.prompt_token_ids or (), params)
        return made

    processor.process_inputs = process_inputs


def refuse_beam_search(request: type[Any]) -> None:
    """Let `request.to_beam_search_params` refuse contexts; a second call changes nothing.

    vLLM's beam search asks by requests of its own, which say nothing of a context.

    Args:
        request: a class of the OpenAI-compatible server's requests.
    """
    stock = request.to_beam_search_params
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        if PARAMETER in (self.kv_transfer_params or {}):
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(
                "vLLM's beam search cannot read a stored context. Leave use_beam_search out.",
                parameter="use_beam_search",
            )
        return stock(self, *args, **kwargs)

    request.to_beam_search_params = to_beam_search_params


def check(processor: Any, params: Any) -> ContextHeader | None:
    """The header of the request's context, if it asks for one.

    Raises vLLM's error for bad requests (HTTP 400), with the `StoreError`'s text, if the context
    cannot be used.
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
        store = _stores.get(processor)
        if store is None:
            store = _stores[processor] = open_store(processor.vllm_config)
        return store.admit(transfer)


@contextlib.contextmanager
def _as_bad_request() -> Iterator[None]:
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    # One request must not end the engine for all others.
    except Exception as error:
        raise VLLMValidationError(refusal(error), parameter="kv_transfer_params") from error


def transfer_of(params: Any) -> dict[str, Any]:
    """The `kv_transfer_params` of sampling parameters; empty if there are none."""
    extra = getattr(params, "extra_args", None) or {}
    transfer = extra.get("kv_transfer_params")
    return transfer if isinstance(transfer, dict) else {}
