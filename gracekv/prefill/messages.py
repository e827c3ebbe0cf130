"""Encodes the messages of a conversation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

from gracekv.errors import PromptError, expect, suggestion
from gracekv.prefill.chat_text import (
    ROLES,
    Message,
    check_text,
    continued,
    has_chat_template,
    placeholder,
    plain_ids,
    rendering,
)

_PLAIN = ({"role": "user", "content": "."}, {"role": "assistant", "content": "."})
_CHANGED = (
    "The chat template does not show each message exactly once and unchanged. Render the "
    "conversation yourself and use model.generate with result.new_cache()."
)


def encoded_messages(
    tokenizer: Any, messages: Sequence[Message], tools: Any = None
) -> tuple[int, list[int]]:
    """How many of the ids stay if messages follow, and the ids of messages and an answer's start.

    A template may put more at the end of unanswered messages, such as an end-of-text token. The
    start of an answer keeps a token, so that a turn has one. No answer is due after a tool call.

    Raises `PromptError` if the template does not show any of them yet.
    """
    renderings = [plain_ids(tokenizer, text) for text in _renderings(tokenizer, messages, tools)]
    whole = renderings[0]
    most = len(whole) - (not messages[-1].get("tool_calls"))
    if not (shared := min(shared_length(*renderings), most)):
        raise PromptError(
            "The chat template shows these messages only with a user's message. Add the first one."
        )
    return shared, whole


def _renderings(tokenizer: Any, messages: Sequence[Message], tools: Any) -> list[str]:
    """Texts of messages: up to an answer if it is due, to their end, and with one more message.

    The last is missing if the template refuses it.
    """
    *_, last = messages
    following: Message = _PLAIN[last["role"] in ("user", "tool")]
    texts = [rendering(tokenizer, messages, answers=False, tools=tools)]
    if calls := last.get("tool_calls"):
        following = {"role": "tool", "content": ".", "tool_call_id": calls[0].get("id")}
    else:
        texts.insert(0, rendering(tokenizer, messages, answers=True, tools=tools))
    with suppress(PromptError):
        texts.append(rendering(tokenizer, [*messages, following], answers=False, tools=tools))
    return texts


def first_turn(tokenizer: Any, question: str, separator: str, template: bool) -> list[int]:
    """Ids of the first question after a context, up to the start of the answer.

    Raises `PromptError` if the chat template changes the texts.
    """
    asked = [{"role": "user", "content": question}]
    return turn_ids(tokenizer, asked, separator, template, after="context")[0]


def turn_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    separator: str,
    template: bool,
    *,
    after: Literal["context", "answer"] | Sequence[Message] = "answer",
    tools: Sequence[Any] | None = None,
    answer_prefix: str = "",
) -> list[list[int]]:
    """Ids of each of `messages`, the last up to the start of the next answer.

    Earlier turns are not rendered again, so their tokens stay as they are, even those that a
    template would remove from old answers.

    Args:
        tokenizer: renders and encodes them.
        messages: in the format of chat templates; none means only the start of the answer.
        separator: between the context and the first message, if that continues the context's turn.
        template: whether the chat format is used, if the tokenizer has one.
        after: "context" if they continue the context's own message, "answer" if they end the turn
            of an answer, or the messages that they follow.
        tools: for the template.
        answer_prefix: start of the next answer.

    Raises `PromptError` if the chat template changes the texts.
    """
    if not (template and has_chat_template(tokenizer)):
        texts = [separator + (message.get("content") or "") for message in messages]
        return [continued(tokenizer, text) for text in (*texts[:-1], texts[-1] + answer_prefix)]
    mark = placeholder("turn", str(messages))
    chat = [_PLAIN[0], {"role": "assistant", "content": mark}, *messages]
    if after == "context":
        first = {**messages[0], "content": f"{mark}{separator}{messages[0]['content']}"}
        chat = [first, *messages[1:]]
    elif not isinstance(after, str):
        chat, mark = [*after, *messages], ""

    def rendered(count: int, *, answers: bool = False) -> str:
        text = rendering(tokenizer, chat[: len(chat) - len(messages) + count], answers, tools)
        if mark and text.count(mark) != 1:
            raise PromptError(_CHANGED)
        return text.partition(mark)[2] if mark else text

    whole = rendered(len(messages), answers=True) + answer_prefix
    questions = [str(x["content"]).strip() for x in messages if x["role"] == "user"]
    if not all(text in whole for text in questions):
        raise PromptError(_CHANGED)
    encoded = partial(continued if mark else plain_ids, tokenizer)
    ids, start, place = encoded(whole), 0, 0
    if not isinstance(after, str):
        start, after_ids = encoded_messages(tokenizer, after, tools)
        if ids[:start] != after_ids[:start]:
            # For example, a thought that is removed from older answers.
            return _after_plain_answer(tokenizer, messages, tools, answer_prefix)
        place = shared_length(*_renderings(tokenizer, after, tools))
    borders = [place]
    for n, message in enumerate(messages[:-1], 1):
        # A template may render a message differently if another follows; it ends where its content
        # ends.
        content = str(message.get("content") or "").strip()
        same = shared_length(rendered(n), whole)
        at = whole.find(content, borders[-1])
        borders.append(max(same, at + len(content) if at >= 0 else 0))
    turns = [continued(tokenizer, whole[a:b]) for a, b in pairwise([*borders, len(whole)])]
    if list(chain.from_iterable(turns)) == ids[start:]:  # special tokens start turns
        return turns
    ends = [shared_length(encoded(whole[:end]), ids) for end in borders[1:]]
    return [ids[a:b] for a, b in pairwise([start, *ends, len(ids)])]


def _after_plain_answer(
    tokenizer: Any, messages: Sequence[Message], tools: Any, answer_prefix: str
) -> list[list[int]]:
    """`turn_ids` after a plain answer, without the template's own end of that answer."""
    mark = placeholder("answer", str(messages))
    texts = _renderings(tokenizer, [_PLAIN[0], {**_PLAIN[1], "content": mark}], tools)
    end = [continued(tokenizer, text.partition(mark)[2]) for text in texts]
    turn, *rest = turn_ids(tokenizer, messages, "", True, tools=tools, answer_prefix=answer_prefix)
    return [turn[shared_length(*end) :], *rest]


def shared_length(*lists: Sequence[Any]) -> int:
    """The length of the longest common prefix of texts or lists."""
    first, *others = lists
    # Slices are compared much faster than single items in Python.
    sizes = range(min(map(len, lists)))
    return bisect_left(sizes, True, key=lambda n: any(x[: n + 1] != first[: n + 1] for x in others))


def plain_messages(given: Any) -> list[Message]:
    """The messages with their content as text, which may be given in parts of type "text".

    Raises `PromptError` unless `given` is a list of messages with roles, and for a role that looks
    mistyped. The content may be missing if an assistant calls tools.
    """
    expect(given, list | tuple, "Messages must be a list (for a text, use chat.ask)", PromptError)
    return [_plain(number, message) for number, message in enumerate(given)]


def _plain(number: int, message: Any) -> Message:
    role = message.get("role") if isinstance(message, Mapping) else None
    near = "" if role in ROLES else suggestion(str(role), ROLES)
    if not isinstance(role, str) or near:  # templates may have others, such as "ipython"
        raise PromptError(
            f"Message {number} must be a mapping with a role of {', '.join(ROLES)}; got "
            f"{role or message!r}.{near}"
        )
    if calls := message.get("tool_calls"):
        calls = [x.model_dump() if hasattr(x, "model_dump") else x for x in calls]
        message = {**message, "tool_calls": calls}
    parts = message.get("content")
    if parts is None and role == "assistant" and message.get("tool_calls"):
        return {**message}
    texts: list[Any] = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        for part in (parts if isinstance(parts, list) else [parts])
    ]
    advice = 'Content must be text, whole or in parts: [{"type": "text", "text": ...}].'
    for text in texts:
        check_text(f"The content of message {number}", text, advice)
    return {**message, "content": "\n".join(texts)}
