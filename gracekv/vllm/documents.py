"""`document`: the prompt with which vLLM compresses a text, and how questions continue it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from gracekv.errors import PromptError, StoreError
from gracekv.prefill.chat_text import continued, encode, has_chat_template, render
from gracekv.prefill.prompt import Prompt
from gracekv.vllm.header import QUESTION, SEPARATOR, Continuation


def document(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text in the tokenizer's chat format (if it has one), up to the question.

    The first message of the conversation is the text and the question together.

    Args:
        tokenizer: of the served model.
        text: the document.

    Raises `PromptError` if the text is empty or the chat template changes it.
    """
    prompt = Prompt.from_chat(tokenizer, context=text, separator=SEPARATOR)
    return prompt.ids[: prompt.spans.context_end].tolist()


def opened(tokenizer: Any, ids: Sequence[int]) -> tuple[list[int], int | None]:
    """Find, on the server, where the document in a compressing request begins and ends.

    Args:
        tokenizer: the server's.
        ids: the request's prompt, from `document`, from a chat whose message is the document, or
            any other.

    Returns:
        The prompt without the end of a chat's turn, so that questions can continue it; and the
        number of tokens before the document, or None if it is not in the tokenizer's chat format.
    """
    ids = list(ids)
    opening, closing = _frame(tokenizer)
    end = len(ids) - len(closing)
    closed = bool(closing) and ids[end:] == closing
    ids = ids[:end] if closed else ids
    if ids[: len(opening)] == opening:
        return ids, len(opening)
    # A chat with its own system prompt.
    return ids, 0 if closed else None


def question_text(tokenizer: Any, separator: str = SEPARATOR, template: bool = True) -> str | None:
    """The text after a context, with "{question}" in it; None if the chat template hides it."""
    chat = template and has_chat_template(tokenizer)
    with contextlib.suppress(PromptError):
        return render(tokenizer, "", QUESTION, separator, chat)[1]
    return None


def continuing(tokenizer: Any, name: str, follow: Continuation, ids: Sequence[int]) -> list[int]:
    """Find, on the server, the tokens with which a request continues a context.

    A request to the chat endpoint opens the conversation again. Replace that opening by the
    separator, so that the message continues the context's turn.

    Args:
        tokenizer: the server's.
        name: of the context.
        follow: how requests continue it.
        ids: the request's prompt.

    Raises `StoreError` if it begins another conversation, or does not end the user's turn.
    """
    ids = list(ids)
    if not follow.tokenizer or follow.has_question:
        return ids
    opening, closing = _frame(tokenizer, follow.separator, follow.template)
    # The question's last token may have merged with the first one of the ending.
    ending = closing[1:] or closing
    ends = any(ids[at : at + len(ending)] == ending for at in range(len(ids)))
    again = ids[: len(opening)] == opening
    if not ends or (ids[:1] == opening[:1] and not again):
        raise StoreError(
            f"This request does not continue context {name!r}, which is the beginning of a user's "
            f"turn: it begins another conversation, or does not end that turn. Ask with "
            f"gracekv.vllm.Client, or through /v1/chat/completions without a system message."
        )
    if opening and again:
        between = _between(tokenizer, follow.separator) if closing else []
        ids = between + ids[len(opening) :]
    return ids


def _between(tokenizer: Any, separator: str) -> list[int]:
    """Token ids of the separator before a question."""
    # Blanks alone may have other tokens than blanks before a word.
    word, both = continued(tokenizer, "a"), continued(tokenizer, separator + "a")
    cut = len(both) - len(word)
    # One token may hold the end of the separator and the start of the word.
    return both[:cut] if both[cut:] == word else continued(tokenizer, separator)


def _frame(
    tokenizer: Any, separator: str = SEPARATOR, template: bool = True
) -> tuple[list[int], list[int]]:
    """Token ids before and after the user's message; [] if the chat template hides them."""
    chat = template and has_chat_template(tokenizer)
    try:
        before, after = render(tokenizer, "", "", separator, chat)
    except PromptError:
        return [], []
    ids, borders = encode(tokenizer, (before, "a", after, ""), special=not chat)
    return ids[: borders[0]], ids[borders[1] :]
