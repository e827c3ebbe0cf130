"""`ServedConversation`: a conversation about a context on a vLLM server."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

from gracekv.decode import Compaction, Limit
from gracekv.errors import CacheError, ConfigError, EditedHistoryError, StoreError, expect, one_of
from gracekv.prefill.chat_text import Message, continued
from gracekv.prefill.history import History
from gracekv.vllm.header import SEPARATOR
from gracekv.vllm.requests import Request
from gracekv.vllm.server import Server, check_options


class ServedConversation(contextlib.AbstractContextManager["ServedConversation"]):
    """Turns about a context on a server; made by `Client.chat`.

    A turn sends the messages that are not compressed yet. When `compact` says so, the server
    extends the context by the older messages into a new context of this conversation, while it
    serves other requests; turns use the old one until the new one is ready. Use it from one thread
    at a time.

    Raises `ConfigError` for a limit without `compact`, or with a strategy or a history.

    Attributes:
        context: name of the context that the next turn reads.
    """

    def __init__(
        self, server: Server, name: str, limit: Limit | None, compact: Compaction | None, count: int
    ) -> None:
        expect(name, str, "A conversation takes the name of a context")
        expect(limit, Limit | None, "limit takes a gracekv.Limit(entries_per_head=512)")
        expect(compact, Compaction | None, "compact takes a gracekv.Compaction(after=..., ratio=4)")
        if limit is not None and compact is None:
            raise ConfigError("A server cuts a conversation when it compresses: also pass compact.")
        if limit is not None and (limit.strategy or limit.history):
            raise ConfigError("A server's limit has no strategy and no history: leave them out.")
        self._server, self._limit, self._compact = server, limit, compact
        expect(count, int, "messages takes the number of messages in the context")
        self._first, self._count, self._closed = name, count, False
        self._name, self._made = f"{name[:96]}.chat-{secrets.token_hex(8)}", 0
        # This conversation's own contexts that the server may hold.
        self._own: list[str] = []
        self._begin()

    def _begin(self) -> None:
        """Begin after the first context."""
        self._history, self.context = History(), self._first
        # Runs of messages to be compressed; the name of the context in the making, and the tokens
        # of its run; the error that the next turn raises.
        self._runs: list[tuple[int, float]] = []
        self._pending: tuple[str, int] | None = None
        self._failure: Exception | None = None

    @property
    def messages(self) -> list[Message]:
        """A copy of the turns so far, as in `gracekv.hf.conversation.Conversation`."""
        return deepcopy(list(self._history.messages))

    def ask(self, question: str, max_tokens: int = 64, **options: Any) -> str:
        """The answer to the next question; arguments and errors are those of `stream`."""
        return "".join(self.stream(question, max_tokens, **options))

    def stream(self, question: str, max_tokens: int = 64, **options: Any) -> Iterator[str]:
        """Iterate over the answer's text as it comes; read to its end, it joins the conversation.

        Args:
            question: the user's turn.
            max_tokens: maximum tokens of the answer.
            options: more fields of `POST /v1/completions`, such as temperature=0.7.

        Raises:
            StoreError: the server refuses the turn, or could not compress older messages, which
                then stay uncompressed.
            ConfigError: `options` ask for several answers or for the prompt with the answer, or
                have `stream` or `max_new_tokens`; or another turn was answered meanwhile.
            PromptError: the question is empty.
            openai.APIError: the server cannot be reached, or takes too long.
        """
        asked = self._history.with_question(question, self._count)
        yield from self._stream(asked, self._history.tools, max_tokens, options)

    def send(
        self,
        messages: Sequence[Message],
        max_tokens: int = 64,
        *,
        tools: Sequence[Any] | None = None,
        edited: Literal["refuse", "compress"] = "refuse",
        **options: Any,
    ) -> str:
        """The answer to a whole history of messages, as in `gracekv.hf.conversation.Conversation`.

        The first turn does not check that the context consists of the first messages, with these
        tools. Raises what `stream` raises, and `EditedHistoryError` and `ConfigError` as
        `Conversation.send` does.
        """
        one_of("edited", edited, ("refuse", "compress"))
        history = self._history
        anew = edited == "compress" and bool(history.edit(messages, tools))
        if anew and self._count:
            context = replace(history, messages=history.messages[: self._count])
            if edit := context.edit(messages, tools, self._count):
                raise EditedHistoryError(edit)
        answer = "".join(self._stream(messages, tools, max_tokens, options, anew=anew))
        if anew:
            self._delete(self.context, *(self._pending or ()))
        return answer

    def _stream(
        self, messages: Any, tools: Any, max_tokens: int, options: Any, *, anew: bool = False
    ) -> Iterator[str]:
        if self._closed:
            raise CacheError("This conversation is closed. Begin another with client.chat().")
        if not anew:
            self._take_over()
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
        if options.get("echo"):
            raise ConfigError("A turn returns the answer alone: leave out echo.")
        check_options(options)
        server, known = self._server, self._history.messages
        begins = anew or not known
        history, context = (History(), self._first) if begins else (self._history, self.context)
        failure = None
        new = history.new_turns(server.tokenizer, messages, tools, self._count, SEPARATOR)
        if begins and self._compact is not None:
            *older, last = new
            history, context, failure = self._compressed(messages, tools, older)
            new = [last]
        ids = (*history.uncompressed, *(x for _, tokens in new for x in tokens))
        text, answer, end = "", list[int](), None
        made = Request(context, ids, None, exact=True)
        for choice in server.choices(made, max_tokens, {**options, "return_token_ids": True}):
            text += choice.text
            answer += getattr(choice, "token_ids", None) or []
            # The token at which the answer stopped, if it is not the tokenizer's own.
            end = getattr(choice, "stop_reason", None)
            yield choice.text
        if not answer or isinstance(end, str):  # its tokens continue past the stop string
            answer = continued(server.tokenizer, text)
        if answer and answer[-1] in (server.tokenizer.eos_token_id, end):
            answer.pop()
        if self._history.messages is not known:
            raise ConfigError("Another turn was answered during this stream. Ask this one again.")
        if begins:
            self._begin()
            self._history, self.context, self._failure = history, context, failure
        # Another stream, which did not end, may have had older messages compressed.
        history, said = self._history, {"role": "assistant", "content": text}
        turns = [*new, ("assistant", answer)]
        self._history = history.with_turns([*messages, said], tools, turns)
        self._take_over()

    def _compressed(
        self, messages: Any, tools: Any, older: Any
    ) -> tuple[History, str, StoreError | None]:
        """A history that begins with `older` turns, compressed step by step, and its context.

        The last is the error, if any, after which no more was compressed.
        """
        history, context = History().with_turns(messages[: self._count], tools, ()), self._first
        failure = None
        for message, turn in zip(messages[self._count :], older, strict=False):
            history = history.with_turns([*history.messages, message], tools, [turn])
            for tokens, ratio in history.due(None if failure else self._compact):
                try:
                    context = self._extended(context, history, tokens, ratio, wait=True)
                except StoreError as error:
                    failure = StoreError(f"Older messages could not be compressed. {error}")
                    history = replace(history, failed=len(history.uncompressed))
                    break
                history = history.compressed(tokens)
                self._delete(self.context, *(self._pending or ()), context)
        return history, context, failure

    def _extended(
        self, context: str, history: History, tokens: int, ratio: float, wait: bool
    ) -> str:
        """The name of a new context: the old one, extended by the history's oldest tokens."""
        name, self._made = f"{self._name}.{self._made}", self._made + 1
        self._own.append(name)
        # As in `Conversation`: a ratio of 1 may count bytes in 16 bits.
        size = {"entries_per_head": tokens} if ratio == 1 else {"ratio": ratio}
        limit = {} if self._limit is None else {"limit": self._limit.to_dict()}
        order = {"extend": {"name": context, "into": name, **size, **limit}}
        self._server.make(order, history.uncompressed[:tokens], wait=wait)
        return name

    def _take_over(self) -> None:
        """Switch to a context that is ready, and have the server make the next one if it is due.

        An error is kept for the next turn, since this one may have its answer already.
        """
        try:
            self._go_on()
        except Exception as error:
            self._failure, self._runs = error, []
            self._history = replace(self._history, failed=len(self._history.uncompressed))

    def _go_on(self) -> None:
        if self._closed:  # meanwhile
            return
        if self._pending is not None:
            name, tokens = self._pending
            made = self._server.find(name)
            if made.state == "compressing":
                return
            self._pending = None
            if made.state != "ready":
                raise StoreError(f"Older messages could not be compressed. {made.reason}")
            self.context, self._history = name, self._history.compressed(tokens)
            self._delete(name)
        self._runs = self._runs or self._history.due(self._compact)
        if self._runs:
            tokens, ratio = self._runs[0]
            name = self._extended(self.context, self._history, tokens, ratio, wait=False)
            self._pending, self._runs = (name, tokens), self._runs[1:]

    def _delete(self, *kept: object) -> None:
        """Delete this conversation's own contexts except those to be `kept`."""
        for name in [name for name in self._own if name not in kept]:
            with contextlib.suppress(StoreError):
                # A server does not delete a context in the making.
                self._server.wait(name)
                self._server.order({"delete": name})
            self._own.remove(name)

    def close(self) -> None:
        """Delete this conversation's own contexts; a further turn raises `CacheError`."""
        self._closed = True
        self._delete()

    def __exit__(self, error: object, *_: object) -> None:
        # A server that is gone must not hide the error that ends the block.
        with contextlib.nullcontext() if error is None else contextlib.suppress(Exception):
            self.close()
