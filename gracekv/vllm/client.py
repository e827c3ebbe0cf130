"""`Client`: compress documents in a vLLM server and ask about them, over OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gracekv.decode import Compaction, Limit
from gracekv.errors import expect
from gracekv.prefill.chat_text import check_text, continued
from gracekv.vllm.chatting import ServedConversation
from gracekv.vllm.requests import document, frame, request, split_document
from gracekv.vllm.server import Context, Server, check_options


@dataclass(frozen=True)
class Client:
    """A client of a vLLM server with gracekv's connector.

    Call `client.compress("book", text, ratio=4)`, then `client.ask("book", "Who is Dinah?")`.
    A request that the server refuses (status 400 or 404) raises `StoreError` with the reason; other
    errors are those of OpenAI's client.

    Attributes:
        url: URL of the server's API.
        model: the model's name on the server; by default its first model.
        tokenizer: the served model's; by default loaded from the server's path or hub name.
        api_key: the server's key, if it needs one.
        timeout: maximum seconds of a compression, or of one attempt of a request. A question or
            listing that fails is sent up to three times, anything else once.
    """

    url: str = "http://localhost:8000/v1"
    model: str | None = None
    tokenizer: Any = None
    api_key: str = field(default="none", repr=False)
    timeout: float = 600.0

    @cached_property
    def _server(self) -> Server:
        return Server(self)

    def compress(
        self, name: str, text: str | Sequence[int], *, wait: bool = True, **options: Any
    ) -> Context:
        """Compress a document into a context, replacing an existing one of that name.

        Args:
            name: name of the context.
            text: the document, to which the chat format is added; or token ids, which are used as
                they are, without the end of a chat's turn.
            wait: whether to wait until the context is ready; if not, see `list`.
            options: one of `ratio` (tokens per entry kept), `entries_per_head` and `kv_bytes`; and
                optionally `recipe` (a pipeline's name; two passes, for lookups, are made with
                transformers and exported), `save=True` (also write it to the store's
                folder) and `expires` (seconds until it is deleted).

        Raises:
            StoreError: the server refuses the document, or compressing fails or takes too long.
            PromptError: the text is empty or not a string, or the chat template changes it.
            MissingDependencyError: openai is not installed, or transformers if it is needed.
        """
        if isinstance(text, str):
            text = document(self._server.tokenizer, text)
            # The server removes one end of a turn. Append one, so that the text keeps its own.
            if split_document(self._server.tokenizer, text)[0] != text:
                text += frame(self._server.tokenizer)[1]
        return self._server.make({"compress": {"name": name, **options}}, text, wait)

    def extend(
        self,
        name: str,
        text: str | Sequence[int],
        *,
        limit: Limit | None = None,
        wait: bool = True,
        **options: Any,
    ) -> Context:
        """Extend a context by a passage; only the passage is read, over the context's entries.

        The context's entries do not change, unless a limit cuts them. The longer context replaces
        it, as in `compress`, unless `into` gives it another name.

        Args:
            name: name of the context.
            text: the passage, which is appended to the document as it is, including separators; or
                token ids.
            limit: the most that the longer context may hold, with its `every` and `window` left
                free for turns; if it is reached, the entries with the highest scores stay.
            wait: whether to wait until the context is ready; if not, see `list`.
            options: those of `compress`, with the budget for the passage alone and the context's
                own recipe by default; and `into`, the name of the longer context.

        Raises:
            StoreError: the server refuses the passage: there is no such context, it is in the
                making, its prompt has a question, or the passage does not fit the model's
                positions; or extending fails (entries have no scores) or takes too long.
            PromptError: the passage is empty.
            MissingDependencyError: openai is not installed, or transformers if it is needed.
        """
        if isinstance(text, str):
            check_text("text", text)
            text = continued(self._server.tokenizer, text)
        expect(limit, Limit | None, "limit takes a gracekv.Limit(entries_per_head=512)")
        if limit is not None:
            options["limit"] = limit.to_dict()
        return self._server.make({"extend": {"name": name, **options}}, text, wait)

    def ask(self, name: str, question: str, max_tokens: int = 64, **options: Any) -> str:
        """The answer to a question about a context, greedy unless `options` say otherwise.

        Args:
            name: name of the context.
            question: a string.
            max_tokens: maximum tokens of the answer.
            options: more fields of `POST /v1/completions`, such as temperature=0.7.

        Raises:
            StoreError: the server has no such context, or cannot use it.
            ConfigError: `options` have `stream`, which is a separate method, or `max_new_tokens`.
            PromptError: the question is empty.
            MissingDependencyError: openai is not installed, or transformers if it is needed.
        """
        check_options(options)
        asked = request(None, name, question, self._server.tokenizer)
        return self._server.answer(asked, max_tokens, options)

    def stream(
        self, name: str, question: str, max_tokens: int = 64, **options: Any
    ) -> Iterator[str]:
        """Iterate over an answer's text as it arrives; arguments and errors are those of `ask`."""
        check_options(options)
        asked = request(None, name, question, self._server.tokenizer)
        yield from (choice.text for choice in self._server.choices(asked, max_tokens, options))

    def chat(
        self,
        name: str,
        limit: Limit | None = None,
        compact: Compaction | None = None,
        *,
        messages: int = 0,
    ) -> ServedConversation:
        """Start a conversation about a context, which itself never changes.

        `with client.chat("book", compact=gracekv.Compaction(after=1024, ratio=4)) as chat` deletes
        what the conversation stored when it ends; `chat.ask("Who is Dinah?")` takes a turn.

        Args:
            name: name of the context.
            limit: the most that context and compressed messages may hold, as in `extend`; requires
                `compact`.
            compact: when the server compresses older messages; by default never.
            messages: number of messages in the context, if it was compressed from the ids of a
                `Prompt.from_messages` up to `spans.context_end`; `chat.send` then continues them.

        Raises `ConfigError` for a limit without `compact`, and for values of another type.
        """
        return ServedConversation(self._server, name, limit, compact, messages)

    def list(self) -> tuple[Context, ...]:
        """All contexts of the server, including those in the making and failed ones."""
        return tuple(map(Context.of, self._server.order({"list": True})["contexts"]))

    def delete(self, name: str) -> None:
        """Delete a context and its files; requests that read it continue.

        Raises `StoreError` if there is no such context.
        """
        self._server.order({"delete": name})
