"""`ServedConversation`: turns about a context on a vLLM server, which do not grow."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from gracekv.decode.compaction import Compaction
from gracekv.decode.limit import Limit
from gracekv.errors import StoreError
from gracekv.prefill.chat_text import check_question, continued, first_turn, next_turn
from gracekv.vllm.header import SEPARATOR
from gracekv.vllm.requests import Request


class ServedConversation:
    """Turns about a context on a server; make it by `Client.chat`.

    A turn sends the messages that are not compressed yet. When `compact` says so, the server
    extends the context by the older ones into a context of this conversation's own, beside other
    requests; turns go on over the old one until the new one is ready. For one thread at a time.

    Attributes:
        messages: the turns so far: {"role": "user" or "assistant", "content": text}.
        context: name of the context that the next turn reads.
    """

    def __init__(
        self, client: Any, context: str, limit: Limit | None, compact: Compaction | None
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self.context = context
        self._client, self._limit, self._compact = client, limit, compact
        self._own, self._made = f"chat-{secrets.token_hex(8)}", 0
        # Uncompressed messages as role and tokens; runs of them to be compressed; the name of the
        # context in the making, and the tokens of its run.
        self._tail: list[tuple[str, list[int]]] = []
        self._runs: list[tuple[int, float]] = []
        self._pending: tuple[str, int] | None = None

    def ask(self, question: str, max_tokens: int = 64, **options: Any) -> str:
        """The answer to the next question; arguments and errors are those of `stream`."""
        return "".join(self.stream(question, max_tokens, **options))

    def stream(self, question: str, max_tokens: int = 64, **options: Any) -> Iterator[str]:
        """Iterate over the answer's text as it comes; read to its end, it joins the conversation.

        Args:
            question: the user's turn.
            max_tokens: the most tokens of the answer.
            options: more fields of `POST /v1/completions`, such as temperature=0.7.

        Raises:
            StoreError: the server refuses the turn; or could not compress older messages, which
                then stay uncompressed.
            PromptError: the question is empty.
        """
        check_question(question)
        self._take_over()
        client = self._client
        encode = next_turn if self.messages else first_turn
        asked = encode(client._tokenizer, question, SEPARATOR, True)
        ids = [x for _, tokens in self._tail for x in tokens] + asked
        text, answer = "", list[int]()
        made = Request(self.context, tuple(ids), None)
        for choice in client._choices(made, max_tokens, {**options, "return_token_ids": True}):
            text += choice.text
            answer += getattr(choice, "token_ids", None) or []
            yield choice.text
        answer = answer or continued(client._tokenizer, text)
        if answer and answer[-1] == client._tokenizer.eos_token_id:
            answer.pop()
        self._tail += [("user", asked), ("assistant", answer)]
        self.messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": text},
        ]
        self._take_over()

    def _take_over(self) -> None:
        """Use a context that is ready, and let the server make the next one if it is due."""
        if self._pending is not None:
            name, tokens = self._pending
            made = next((x for x in self._client.list() if x.name == name), None)
            if made is not None and made.state == "compressing":
                return
            self._pending = None
            if made is None or made.state != "ready":
                self._runs = []
                reason = "It is gone." if made is None else made.reason
                raise StoreError(f"Older messages could not be compressed. {reason}")
            self._delete(self.context)
            self.context = name
            while tokens > 0:
                tokens -= len(self._tail.pop(0)[1])
        if self._compact is not None and not self._runs:
            lengths = [(role, len(ids)) for role, ids in self._tail]
            self._runs = self._compact.runs(lengths, len(self.messages) - len(self._tail))
        if self._runs:
            tokens, ratio = self._runs.pop(0)
            name, self._made = f"{self._own}.{self._made}", self._made + 1
            ids = [x for _, ids in self._tail for x in ids][:tokens]
            options = {"into": name, "ratio": ratio, "limit": self._limit}
            self._client.extend(self.context, ids, wait=False, **options)
            self._pending = name, tokens

    def _delete(self, name: str) -> None:
        """Delete a context if it is this conversation's own."""
        if name.startswith(self._own):
            with contextlib.suppress(StoreError):
                self._client.delete(name)

    def close(self) -> None:
        """Delete the contexts of this conversation's own."""
        for name in (self.context, self._pending[0] if self._pending else ""):
            self._delete(name)

    def __enter__(self) -> ServedConversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
