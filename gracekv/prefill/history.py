"""`History`: the messages of a conversation that were read, and what is new in a longer list."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from gracekv.errors import EditedHistoryError, PromptError
from gracekv.prefill.chat_text import Message, check_question, has_chat_template, with_mappings
from gracekv.prefill.messages import encoded_messages, plain_messages, shared_length, turn_ids

# How many of an answer's last tokens are compared with the template's end of a turn.
_ENDING = 16
# Templates do not render other fields, which clients add.
_COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")


@dataclass(frozen=True)
class History:
    """The messages of a conversation about a compressed context.

    It is immutable: to undo a turn that fails, keep the history from before.

    Attributes:
        messages: all that were read or answered, in OpenAI's format.
        tools: the definitions of the context's tools, or None.
        ids: token ids of the messages after the context, compressed or not.
        tail: role and number of tokens of each uncompressed message; these are the last `ids`.
        failed: number of uncompressed tokens when compressing them last failed.
    """

    messages: tuple[Message, ...] = ()
    tools: Sequence[Any] | None = None
    ids: tuple[int, ...] = ()
    tail: tuple[tuple[str, int], ...] = ()
    failed: int = 0

    @property
    def uncompressed(self) -> tuple[int, ...]:
        """Token ids of the uncompressed messages."""
        return self.ids[len(self.ids) - sum(tokens for _, tokens in self.tail) :]

    def with_question(self, question: str, context: int) -> list[Message]:
        """The messages with the user's next question; `context` as in `new_turns`.

        Raises `PromptError` if the question is empty or the context's messages were not sent yet.
        """
        check_question(question)
        if context and not self.messages:
            raise PromptError("This context consists of messages: begin with chat.send(messages).")
        return [*self.messages, {"role": "user", "content": question}]

    def edit(self, messages: Sequence[Message], tools: Any, context: int = 0) -> str | None:
        """How these messages or tools differ from those that were read; None if they continue them.

        `context` is as in `new_turns`.

        Raises `PromptError` if a message is malformed.
        """
        given = plain_messages(messages)
        if self.messages and (tools or None) != self.tools:
            return "The tools are not those that the conversation began with."
        for number, old in enumerate(plain_messages(self.messages)):
            if number >= len(given) or not _is_same(old, given[number]):
                anew = 'compress it again with edited="compress"'
                if number < context:
                    anew = "compress a new context: this message belongs to the compressed one"
                return (
                    f"Message {number} (role {old['role']!r}) differs from the one that was read. "
                    f"Send the history unchanged, or {anew}."
                )
        return None

    def new_turns(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        context: int = 0,
        separator: str = "\n\n",
        template: bool = True,
    ) -> list[tuple[str, list[int]]]:
        """Role and token ids of each of `messages` that has not been read yet.

        The last one's ids go up to the start of the answer.

        Args:
            tokenizer: renders and encodes messages.
            messages: the whole history in OpenAI's format.
            tools: the definitions of the context's tools.
            context: how many messages the compressed context consists of; 0 if it is a document,
                whose turn the first message continues.
            separator: between a document and the first message.
            template: whether the chat format is used.

        Raises:
            EditedHistoryError: a message differs from the one read at its place, or the tools do.
            PromptError: a message is malformed, there is no new one, or the template cannot show it
                after the context.
        """
        if edit := self.edit(messages, tools, context):
            raise EditedHistoryError(edit)
        known, given, read = self.messages, plain_messages(messages), self.ids[-_ENDING:]
        new = given[max(len(known), context) :]
        if not known and not context and (tools or (new and new[0]["role"] != "user")):
            raise PromptError(
                "A system prompt and tools come before the context, which is a document here: "
                "after it comes a user's message. Compress Prompt.from_messages(tokenizer, "
                "messages, tools=tools) instead."
            )
        if not new and (known or len(given) < max(context, 1)):
            raise PromptError("There is no new message to answer.")
        after: Any = "answer" if known else given[:context] or "context"
        added = {*getattr(tokenizer, "get_added_vocab", dict)().values()}
        called = [{"role": "user", "content": "."}, given[len(known) - 1]] if known else []
        begin, count, call = 0, 0, list[int]()
        if template and called and called[1].get("tool_calls") and has_chat_template(tokenizer):
            # Results are only shown after a call, and a call may end differently from an answer.
            begin = len(encoded_messages(tokenizer, called[:1], tools)[1])
            count, call = encoded_messages(tokenizer, called, tools)
            after = after if added.isdisjoint(call[begin:]) else called
        first, *rest = turn_ids(tokenizer, new, separator, template, after=after, tools=tools)
        if after is called:
            first = _after_call(read, call, begin, count, first, added)
        # The answer's end, part of which the model may have written, such as the closing tag of a
        # call.
        ends = (n for n in range(min(len(read), len(first)), 0, -1) if [*read[-n:]] == first[:n])
        if (written := next(ends, 0)) and not added.isdisjoint(first[:written]):
            first = first[written:]
        roles = [one["role"] for one in new] or [given[-1]["role"]]
        return list(zip(roles, [first, *rest], strict=True))

    def with_turns(
        self, messages: Sequence[Message], tools: Any, turns: Sequence[tuple[str, Sequence[int]]]
    ) -> History:
        """The history of all `messages`, of which the last, with these roles and ids, are new."""
        held, ids = set(map(id, self.messages)), (*self.ids, *(x for _, ids in turns for x in ids))
        tail = (*self.tail, *((role, len(ids)) for role, ids in turns))
        # Copies of what is not held yet, so that edits by the caller are noticed.
        copies = tuple(x if id(x) in held else deepcopy(x) for x in messages)
        return History(copies, deepcopy(tools or None), ids, tail, self.failed)

    def due(self, compact: Any, least: int = 8) -> list[tuple[int, float]]:
        """The runs that a `Compaction` or None compresses now; see `Compaction.runs`."""
        first = len(self.messages) - len(self.tail)
        return compact.runs(self.tail, first, least, self.failed) if compact else []

    def compressed(self, tokens: int) -> History:
        """The history once its oldest uncompressed messages, of so many tokens, are compressed."""
        count = sum(end <= tokens for end in accumulate(n for _, n in self.tail))
        return replace(self, tail=self.tail[count:], failed=0)


def _after_call(
    read: Sequence[int], call: list[int], begin: int, count: int, first: list[int], added: set[int]
) -> list[int]:
    """The ids after the model's own part of a tool call, up to the end of the first result.

    Args:
        read: the last ids that the model wrote.
        call: ids of a call at the end of a history, and of the message before it.
        begin: where the call begins in `call`.
        count: how many ids of `call` remain if a result follows.
        first: the ids that then follow.
        added: ids of the chat format's tokens.
    """
    if places := [n for n in range(begin, count) if call[n] in added]:
        end = _written_length(read, call[begin:count], added)
        return call[begin + end if end else places[-1] : count] + first
    # For example, an empty thought that is shown only in the last message.
    place = max(n for n in range(begin, len(call)) if call[n] in added)
    shown = call[begin:count] + first
    where = partial(_written_length, call=shown[: len(call) - begin], added=added)
    end = where(read) or where(call[begin:place])
    if not end and first[0] not in added:  # the call has no token of the format either
        end = where(call[begin:place], added={*call})
    return shown[end:] if end else call[place:] + first


def _written_length(read: Sequence[int], call: Sequence[int], added: set[int]) -> int:
    """How many ids of the template's form of a call the model wrote; its last ones are `read`.

    The longest common ending decides, if it has a token of the format; 0 if none has.
    """
    last, matches = [*reversed(read)], [(0, 0)]
    for n in range(len(call), 0, -1):
        same = shared_length(last, [*reversed(call[max(0, n - _ENDING) : n])])
        if not added.isdisjoint(last[:same]):
            matches.append((same, n))
    return max(matches)[1]


def _is_same(old: Message, new: Message) -> bool:
    """Whether `new` is `old`; an answer may come back as the tool calls parsed from it."""
    old, new = with_mappings(old), with_mappings(new)
    parsed = new.get("tool_calls") and not old.get("tool_calls")
    if parsed and old["role"] == new["role"] == "assistant":
        return True
    return all((old.get(name) or "") == (new.get(name) or "") for name in _COMPARED)
