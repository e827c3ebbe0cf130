"""`request`: a question about a stored context, ready for vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gracekv.errors import PromptError, StoreError
from gracekv.prefill.chat_text import check_question, first_turn
from gracekv.prefill.fingerprint import tokenizer_marks
from gracekv.vllm.header import PARAMETER, SEPARATOR, ContextHeader
from gracekv.vllm.store import ContextStore


@dataclass(frozen=True, slots=True)
class Request:
    """A request to vLLM's `LLM` or its OpenAI-compatible server, about a context or to make one.

    Attributes:
        context: the context's name.
        prompt_ids: the tokens that vLLM reads: question and chat format without the context.
        room: the most tokens of prompt and answer together within the model's positions, or None if
            unknown.
        order: such as {"compress": {...}}; None for a question.
    """

    context: str
    prompt_ids: tuple[int, ...]
    room: int | None
    order: Mapping[str, Any] | None = None

    @property
    def prompt(self) -> dict[str, Any]:
        """The first argument of `LLM.generate`, or an item of its list."""
        return {"prompt_token_ids": list(self.prompt_ids)}

    @property
    def extra_args(self) -> dict[str, Any]:
        """The value of `SamplingParams(extra_args=...)`, which names the context."""
        return {"kv_transfer_params": {PARAMETER: self.order or self.context}}

    def sampling_params(self, max_tokens: int = 64, **options: Any) -> Any:
        """vLLM's `SamplingParams`, greedy unless `options` say otherwise; needs vLLM.

        Raises `PromptError` if prompt and answer do not fit the model's positions.
        """
        self._check_room(max_tokens)
        from vllm import SamplingParams

        extra = {**options.pop("extra_args", {}), **self.extra_args}
        return SamplingParams(**{"temperature": 0.0, **options}, max_tokens=max_tokens,
                              extra_args=extra)  # fmt: skip

    def body(self, model: str, max_tokens: int = 64, **options: Any) -> dict[str, Any]:
        """The JSON body for `POST /v1/completions`, greedy unless `options` say otherwise.

        Args:
            model: the model's name on the server.
            max_tokens: the most tokens of the answer.
            options: more fields, such as stream=True.

        Raises `PromptError` if prompt and answer do not fit the model's positions.
        """
        self._check_room(max_tokens)
        return {
            "model": model,
            "prompt": list(self.prompt_ids),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            **options,
            **self.extra_args,
        }

    def _check_room(self, max_tokens: int) -> None:
        if self.room is not None and len(self.prompt_ids) + max_tokens - 1 > self.room:
            raise PromptError(
                f"A prompt of {len(self.prompt_ids)} tokens and {max_tokens} new ones pass the "
                f"{self.room} positions that the context {self.context!r} leaves. Ask a shorter "
                f"question, or lower max_tokens."
            )


def request(
    store: str | os.PathLike[str] | ContextStore | None,
    name: str,
    question: str | None = None,
    tokenizer: Any = None,
) -> Request:
    """A question about the context `name`, ready for vLLM.

    `llm.generate(asked.prompt, asked.sampling_params(max_tokens=32))` asks it.

    Args:
        store: the folder or the store; None for a context that vLLM made from a `document`, whose
            header is not needed.
        name: of the context.
        question: a text; None for a context whose prompt already had its question.
        tokenizer: the one that made the context's ids; vocabulary and chat template are compared.

    Raises:
        StoreError: the context is missing or damaged, or was made with another tokenizer.
        PromptError: the question is empty or missing, or the context already has one.
    """
    if store is None:
        check_question(question)
        return Request(name, tuple(first_turn(tokenizer, str(question), SEPARATOR, True)), None)
    if not isinstance(store, ContextStore):
        store = ContextStore(store)
    header = store.header(name)
    ids = header.prompt_ids
    if header.has_question != (question is None):
        raise PromptError(
            f"The context {name!r} has a question already: omit question. To ask other questions, "
            f"compress a prompt without one."
            if header.has_question
            else f"The context {name!r} has no question of its own: pass question."
        )
    if question is not None:
        check_question(question)
        _check_tokenizer(name, header, tokenizer)
        ids = (*ids, *first_turn(tokenizer, question, header.separator, header.template))
    # A context that is itself longer than the model's positions had its warning.
    room = None
    if header.positions is not None and header.length <= header.positions:
        room = header.positions - header.length
    return Request(name, ids, room)


def _check_tokenizer(name: str, header: ContextHeader, tokenizer: Any) -> None:
    if tokenizer is None:
        raise PromptError("A question needs the tokenizer that made the context: tokenizer=...")
    other = [
        mark
        for mark, value in tokenizer_marks(tokenizer).items()
        if header.tokenizer.get(mark, value) != value
    ]
    if other:
        raise StoreError(
            f"The context {name!r} was made with another tokenizer: {', '.join(other)} differ."
        )
