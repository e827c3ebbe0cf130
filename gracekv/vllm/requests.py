"""`request`: a question about a stored context, ready for vLLM; `document`: a text to compress.

Also finds, on the server, the document in a request and the question that continues a context.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gracekv.errors import PromptError, StoreError
from gracekv.prefill.chat_text import check_question, continued, encode, has_chat_template, render
from gracekv.prefill.fingerprint import tokenizer_marks
from gracekv.prefill.messages import first_turn
from gracekv.prefill.prompt import Prompt
from gracekv.vllm.header import EXACT, PARAMETER, QUESTION, SEPARATOR, TurnFormat
from gracekv.vllm.store import ContextStore

_TAGS = re.compile(r"(\s|<[^<>]*>)*")


@dataclass(frozen=True, slots=True)
class Request:
    """A request to vLLM's `LLM` or its OpenAI-compatible server, about a context or to make one.

    Attributes:
        context: the context's name.
        prompt_ids: the tokens that vLLM reads: question and chat format without the context.
        room: maximum tokens of prompt and answer together within the model's positions, or None if
            unknown.
        order: an order such as {"compress": {...}}; None for a question.
        exact: whether the server reads these tokens even if they open a conversation.
    """

    context: str
    prompt_ids: tuple[int, ...]
    room: int | None
    order: Mapping[str, Any] | None = None
    exact: bool = False

    @property
    def prompt(self) -> dict[str, Any]:
        """The first argument of `LLM.generate`, or an item of its list."""
        return {"prompt_token_ids": list(self.prompt_ids)}

    @property
    def extra_args(self) -> dict[str, Any]:
        """The value of `SamplingParams(extra_args=...)`, which names the context."""
        exact = {EXACT: True} if self.exact else {}
        return {"kv_transfer_params": {PARAMETER: self.order or self.context, **exact}}

    def sampling_params(self, max_tokens: int = 64, **options: Any) -> Any:
        """vLLM's `SamplingParams`, greedy unless `options` say otherwise; needs vLLM.

        Raises `PromptError` if prompt and answer do not fit the model's positions.
        """
        self._check_room(max_tokens)
        from vllm import SamplingParams

        options["extra_args"] = self._with(options.get("extra_args", {}))
        return SamplingParams(**{"temperature": 0.0, **options}, max_tokens=max_tokens)

    def body(self, model: str, max_tokens: int = 64, **options: Any) -> dict[str, Any]:
        """The JSON body for `POST /v1/completions`, greedy unless `options` say otherwise.

        Args:
            model: the model's name on the server.
            max_tokens: maximum tokens of the answer.
            options: more fields, such as stream=True.

        Raises `PromptError` if prompt and answer do not fit the model's positions.
        """
        self._check_room(max_tokens)
        fixed = {"model": model, "prompt": list(self.prompt_ids), "max_tokens": max_tokens}
        return {**fixed, "temperature": 0.0, **self._with(options)}

    def _with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options`, with the context's name added to their `kv_transfer_params`."""
        own, name = self.extra_args, "kv_transfer_params"
        return {**options, name: {**(options.get(name) or {}), **own[name]}}

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
        name: name of the context.
        question: a string; None for a context whose prompt already had its question.
        tokenizer: the one that made the context's ids; vocabulary and chat template are compared.

    Raises:
        StoreError: the context is missing or damaged, or was made with another tokenizer.
        PromptError: the question is empty or missing, or the context already has one.
    """
    if question is not None or store is None:
        check_question(question)
        if tokenizer is None:
            raise PromptError("A question needs the tokenizer that made the context: tokenizer=...")
    if store is None:
        return Request(name, tuple(first_turn(tokenizer, str(question), SEPARATOR, True)), None)
    header = (store if isinstance(store, ContextStore) else ContextStore(store)).header(name)
    ids = header.prompt_ids
    if header.has_question != (question is None):
        raise PromptError(
            f"The context {name!r} has a question already: omit question. To ask other questions, "
            f"compress a prompt without one."
            if header.has_question
            else f"The context {name!r} has no question of its own: pass question."
        )
    if question is not None:
        own, marks = header.tokenizer, tokenizer_marks(tokenizer)
        if other := [mark for mark, value in marks.items() if own.get(mark, value) != value]:
            raise StoreError(f"Context {name!r} has another tokenizer: {', '.join(other)} differ.")
        ids = (*ids, *first_turn(tokenizer, question, header.separator, header.template))
    # A context that is itself longer than the model's positions has caused a warning already.
    room = None
    if header.positions is not None and header.length <= header.positions:
        room = header.positions - header.length
    return Request(name, ids, room)


def document(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text in the tokenizer's chat format (if it has one), up to the question.

    The first message of the conversation is the text and the question together.

    Args:
        tokenizer: tokenizer of the served model.
        text: the document.

    Raises `PromptError` if the text is empty or the chat template changes it.
    """
    prompt = Prompt.from_chat(tokenizer, context=text, separator=SEPARATOR)
    return prompt.ids[: prompt.spans.context_end].tolist()


def split_document(tokenizer: Any, ids: Sequence[int]) -> tuple[list[int], int | None]:
    """Find, on the server, where the document in a compressing request begins and ends.

    Args:
        tokenizer: the server's tokenizer.
        ids: the request's prompt, from `document`, from a chat whose message is the document, or
            any other.

    Returns:
        The prompt without the end of a chat's turn, so that questions can continue it; and the
        number of tokens before the document, or None if it is not in the tokenizer's chat format.
    """
    ids = list(ids)
    opening, closing = frame(tokenizer)
    # The document's last token may have merged with the ending's first one. Its rest tells the
    # ending if it is more than blanks.
    rest = closing[1:] if tokenizer.decode(closing[1:]).strip() else []
    for ending in (closing, rest):
        size, last = len(ending), len(ids) - len(ending)
        ends = [x for x in range(max(0, last - 16), last + 1) if size and ids[x:][:size] == ending]
        if ends:
            break
    # A template may add text before the answer, such as the tags of an empty thought.
    more = ids[ends[-1] + size :] if ends else []
    closed = ends and ending[0] not in more and _TAGS.fullmatch(tokenizer.decode(more))
    ids = ids[: ends[-1]] if closed else ids
    if (start := _message_start(tokenizer, ids, opening)) is not None:
        return ids, start
    # A chat with its own system prompt.
    return ids, 0 if closed else None


def passage(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Find, on the server, the passage in a request that extends a context.

    It is the message of a chat; other ids are used as they are, without the special tokens with
    which the server's tokenizer begins every text.

    Raises `StoreError` if it is a chat with a system prompt.
    """
    text_ids, start = split_document(tokenizer, ids)
    if start == 0 and len(text_ids) < len(ids):
        raise StoreError("A passage is one user's message: leave the system prompt out.")
    if start:
        return text_ids[start:]
    special, _ = frame(tokenizer, template=False)
    ids = list(ids)
    return ids[len(special) :] if ids[: len(special)] == special else ids


def question_text(tokenizer: Any, separator: str = SEPARATOR, template: bool = True) -> str | None:
    """The text after a context, with "{question}" in it; None if the chat template hides it."""
    with contextlib.suppress(PromptError):
        chat = template and has_chat_template(tokenizer)
        return render(tokenizer, "", QUESTION, separator, chat)[1]
    return None


def continuing(tokenizer: Any, name: str, follow: TurnFormat, ids: Sequence[int]) -> list[int]:
    """Find, on the server, the tokens with which a request continues a context.

    A request to the chat endpoint opens the conversation again. Replace that opening by the
    separator, so that the message continues the context's turn.

    Args:
        tokenizer: the server's tokenizer.
        name: name of the context.
        follow: how requests continue it.
        ids: the request's prompt.

    Raises `StoreError` if it begins another conversation, or does not end the user's turn.
    """
    ids = list(ids)
    if not follow.tokenizer or follow.has_question:
        return ids
    opening, closing = frame(tokenizer, follow.separator, follow.template)
    # The question's last token may have merged with the first one of the ending.
    ending = closing[1:] or closing
    ends = any(ids[at : at + len(ending)] == ending for at in range(len(ids)))
    start = _message_start(tokenizer, ids, opening)
    if not ends or (ids[:1] == opening[:1] and start is None):
        raise StoreError(
            f"This request does not continue context {name!r}, which is the beginning of a user's "
            f"turn: it begins another conversation, or does not end that turn. Ask with "
            f"gracekv.vllm.Client, or through /v1/chat/completions without a system message."
        )
    if opening and start is not None:
        separator = follow.separator
        if ids[: (size := len(opening))] != opening:
            # The last of these tokens also holds the beginning of the message.
            last, merged = (tokenizer.decode(x[size - 1 : size]) for x in (opening, ids))
            separator += merged[len(last) :]
        ids = ids[size:]
        if closing:
            # Whitespace alone may be tokenised differently than before a word.
            word, joint = continued(tokenizer, "a"), continued(tokenizer, separator + "a")
            cut = len(joint) - len(word)
            # One token may hold the end of the separator and the start of the word.
            alone = joint[cut:] != word
            ids = (continued(tokenizer, separator) if alone else joint[:cut]) + ids
    return ids


def _message_start(tokenizer: Any, ids: list[int], opening: list[int]) -> int | None:
    """Where the message behind `opening` begins in `ids`, or None if they begin otherwise.

    Its leading whitespace may share a token with the opening's end. As in `Prompt.from_chat`, the
    token belongs to the message if at least half of its characters do.
    """
    size = len(opening)
    if ids[:size] == opening:
        return size
    if ids[: size - 1] == opening[:-1] and len(ids) >= size:
        last, merged = (tokenizer.decode(x[size - 1 : size]) for x in (opening, ids))
        if last and merged.startswith(last):
            return size - (len(merged) >= 2 * len(last))
    return None


def frame(
    tokenizer: Any, separator: str = SEPARATOR, template: bool = True
) -> tuple[list[int], list[int]]:
    """Token ids before and after the user's message; [] if the chat template hides them.

    Raises `StoreError` if the tokenizer's chat template cannot be used.
    """
    try:
        chat = template and has_chat_template(tokenizer)
    except PromptError as error:
        raise StoreError(str(error)) from error
    try:
        before, after = render(tokenizer, "", "", separator, chat)
    except PromptError:
        return [], []
    ids, borders = encode(tokenizer, (before, "a", after, ""), special=not chat)
    return ids[: borders[0]], ids[borders[1] :]
