"""Compares a list of messages with what a conversation has read, and encodes the new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gracekv.errors import EditedHistoryError, PromptError
from gracekv.prefill.chat_text import turn_ids

Message = Mapping[str, Any]
# Other fields, which clients add, are not rendered.
_COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")


def new_turns(
    tokenizer: Any,
    known: Sequence[Message],
    given: Sequence[Message],
    context: int = 0,
    *,
    tools: Sequence[Any] | None = None,
    separator: str = "\n\n",
    template: bool = True,
) -> list[tuple[str, list[int]]]:
    """Role and token ids of each message of `given` that was not read yet.

    The last one's ids go up to the start of the answer.

    Args:
        tokenizer: renders and encodes messages.
        known: the messages that were read, the last one an answer; none before the first turn.
        given: the whole history as OpenAI's clients send it.
        context: how many messages the compressed context consists of; 0 if it is a document, whose
            turn the first message goes on with.
        tools: the definitions of tools, which belong to the context.
        separator: between a document and the first message.
        template: whether the chat format is used.

    Raises:
        EditedHistoryError: a message differs from the one that was read in its place.
        PromptError: there is no new message, or the template cannot show it after the context.
    """
    for number, old in enumerate(known):
        if number >= len(given) or not _is_same(old, given[number]):
            raise EditedHistoryError(
                f"Message {number}, of role {old['role']!r}, is not the one that was read. Send "
                f'the history unchanged, or compress it anew with edited="compress".'
            )
    new = given[max(len(known), context) :]
    if not known and not context and (tools or (new and new[0]["role"] != "user")):
        raise PromptError(
            "A system prompt and tools stand before the context, which is a document here: after "
            "it, the first message is a user's. Compress Prompt.from_messages(tokenizer, messages, "
            "tools=tools) instead."
        )
    if not new and (known or not context):
        raise PromptError("There is no new message to answer.")
    after: Any = "answer" if known else "messages" if context else "context"
    ids = turn_ids(tokenizer, new, separator, template, after=after, tools=tools)
    return list(zip([one["role"] for one in new] or [given[-1]["role"]], ids, strict=True))


def _is_same(old: Message, given: Message) -> bool:
    """Whether `given` is `old`; an answer may come back as the tool calls that it was read as."""
    if old["role"] == given["role"] == "assistant" and given.get("tool_calls"):
        return old.get("tool_calls") in (None, given["tool_calls"])
    return all((old.get(name) or "") == (given.get(name) or "") for name in _COMPARED)
