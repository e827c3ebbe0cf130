"""`document`: a text as the prompt by which vLLM compresses it, and how questions go on with it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from gracekv.errors import PromptError, StoreError
from gracekv.prefill.chat_text import continued, encode, has_chat_template, render
from gracekv.prefill.prompt import Prompt
from gracekv.vllm.header import QUESTION, SEPARATOR, ContextHeader
from gracekv.vllm.orders import Follow


def document(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text in the tokenizer's chat format, if it has one, up to where questions go on.

    Question and answer follow as in one conversation whose first message is text and question.

    Args:
        tokenizer: of the served model.
        text: the document.

    Raises `PromptError` if the text is empty or the chat template changes it.
    """
    prompt = Prompt.from_chat(tokenizer, context=text, separator=SEPARATOR)
    return prompt.ids[: prompt.spans.context_end].tolist()


def opened(tokenizer: Any, ids: Sequence[int]) -> tuple[list[int], int | None]:
    """Where a compressing request's document begins and ends, found on the server's side.

    Args:
        tokenizer: the server's.
        ids: the request's prompt: of `document`, of a chat whose message is the document, or any.

    Returns:
        The prompt, without what ends a chat's turn, so that questions go on in it; and how many of
        its tokens stand before the document, None if it is in no format of the tokenizer.
    """
    ids = list(ids)
    opening, closing = _frame(tokenizer)
    end = len(ids) - len(closing)
    closed = bool(closing) and ids[end:] == closing
    ids = ids[:end] if closed else ids
    if ids[: len(opening)] == opening:
        return ids, len(opening)
    # A chat with a system prompt of its own.
    return ids, 0 if closed else None


def question_text(tokenizer: Any, separator: str = SEPARATOR, template: bool = True) -> str | None:
    """What follows a context as text, with "{question}" in it; None if it cannot be said."""
    chat = template and has_chat_template(tokenizer)
    with contextlib.suppress(PromptError):
        return render(tokenizer, "", QUESTION, separator, chat)[1]
    return None


def continuing(
    tokenizer: Any, name: str, header: ContextHeader | Follow, ids: Sequence[int]
) -> list[int]:
    """The tokens with which a request goes on after a context, found on the server's side.

    A request to the chat endpoint opens the conversation again. The separator takes the place of
    what opens it, so that its message goes on in the context's turn.

    Args:
        tokenizer: the server's.
        name: of the context.
        header: of the context, or what else says how it goes on.
        ids: the request's prompt.

    Raises `StoreError` if it begins another conversation, or does not end the user's turn.
    """
    ids = list(ids)
    if not header.tokenizer or header.has_question:
        return ids
    opening, closing = _frame(tokenizer, header.separator, header.template)
    # Its first token may have become one with the question's last.
    ending = closing[1:] or closing
    ends = any(ids[at : at + len(ending)] == ending for at in range(len(ids)))
    again = ids[: len(opening)] == opening
    if not ends or (ids[:1] == opening[:1] and not again):
        raise StoreError(
            f"This request does not continue context {name!r}, which is a user's turn that goes "
            f"on: it begins another conversation, or does not end that turn. Ask by "
            f"gracekv.vllm.Client, or by /v1/chat/completions without a system message."
        )
    if opening and again:
        between = _between(tokenizer, header.separator) if closing else []
        ids = between + ids[len(opening) :]
    return ids


def _between(tokenizer: Any, separator: str) -> list[int]:
    """Ids of a separator between a text and a question whose own ids follow."""
    # Blanks alone may be other tokens than blanks before a word.
    word, both = continued(tokenizer, "a"), continued(tokenizer, separator + "a")
    cut = len(both) - len(word)
    # A token may hold the separator's end and the word's start.
    return both[:cut] if both[cut:] == word else continued(tokenizer, separator)


def _frame(
    tokenizer: Any, separator: str = SEPARATOR, template: bool = True
) -> tuple[list[int], list[int]]:
    """Ids of what stands before and after the user's message; none if the format hides it."""
    chat = template and has_chat_template(tokenizer)
    try:
        before, after = render(tokenizer, "", "", separator, chat)
    except PromptError:
        return [], []
    ids, borders = encode(tokenizer, (before, "a", after, ""), special=not chat)
    return ids[: borders[0]], ids[borders[1] :]
