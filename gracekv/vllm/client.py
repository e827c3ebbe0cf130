"""`Client`: compress documents in a vLLM server and ask about them, over OpenAI's client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from gracekv.decode import Compaction, Limit
from gracekv.errors import ConfigError, PromptError, StoreError, expect, required
from gracekv.prefill.chat_text import check_text, continued
from gracekv.prefill.prompt import checked_ids
from gracekv.vllm.chatting import ServedConversation
from gracekv.vllm.header import PARAMETER
from gracekv.vllm.requests import Request, document, frame, request, split_document

# Seconds between polls for a context in the making. Source: ours.
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Context:
    """A context as the server lists it; fields that are not known (yet) are None.

    Attributes:
        name: name of the context.
        state: "compressing", "ready" or "failed".
        length: tokens of the document.
        entries: total over layers and heads.
        bytes: total of keys and values.
        ratio: entries of a full cache per entry.
        seconds: time from the document's first token until the context was ready.
        recipe: the pipeline's name.
        saved: whether it is also in the store's folder.
        reason: why it failed.
        recorded_bytes: peak bytes held of its document.
    """

    name: str
    state: str
    length: int | None = None
    entries: int | None = None
    bytes: int | None = None
    ratio: float | None = None
    seconds: float | None = None
    recipe: str | None = None
    saved: bool = False
    reason: str | None = None
    recorded_bytes: int | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Context:
        """From a server's reply; unknown fields are ignored."""
        return cls(**{name: said[name] for name in cls.__slots__ if name in said})


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

    def __getstate__(self) -> dict[str, Any]:
        # Without OpenAI's client, which cannot be pickled.
        return {x.name: getattr(self, x.name) for x in fields(self)}

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
                optionally `recipe` (a pipeline's name), `save=True` (also write it to the store's
                folder) and `expires` (seconds until it is deleted).

        Raises:
            StoreError: the server refuses the document, or compressing fails or takes too long.
            PromptError: the text is empty or not a string, or the chat template changes it.
            MissingDependencyError: openai is not installed, or transformers if it is needed.
        """
        if isinstance(text, str):
            text = document(self._tokenizer, text)
            # The server removes one end of a turn. Append one, so that the text keeps its own.
            if split_document(self._tokenizer, text)[0] != text:
                text += frame(self._tokenizer)[1]
        return self._make({"compress": {"name": name, **options}}, text, wait)

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
            text = continued(self._tokenizer, text)
        expect(limit, Limit | None, "limit takes a gracekv.Limit(entries_per_head=512)")
        if limit is not None:
            options["limit"] = limit.to_dict()
        return self._make({"extend": {"name": name, **options}}, text, wait)

    def _make(self, order: Mapping[str, Any], ids: Sequence[int], wait: bool) -> Context:
        if not (ids := checked_ids(ids).tolist()):
            raise PromptError("The document or passage is empty: there is nothing to read.")
        made = Context.of(self._order(order, ids))
        if wait:
            made = self._wait(made.name)
            if made.state != "ready":
                reason = made.reason or f"Wait longer than {self.timeout:g} s (timeout=...)."
                raise StoreError(f"The context {made.name!r} is {made.state}. {reason}")
        return made

    def _look(self, name: str) -> Context:
        """The context as the server lists it now, or one whose state is "gone"."""
        gone = Context(name, "gone", reason="It expired or was deleted.")
        return next(map(Context.of, self._order({"list": name})["contexts"]), gone)

    def _wait(self, name: str) -> Context:
        """The context once it is made or "gone", or as it is after `timeout`."""
        end = time.monotonic() + self.timeout
        while (made := self._look(name)).state == "compressing" and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return made

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
        _check_options(options)
        asked = request(None, name, question, self._tokenizer)
        return str(self._send(asked.body(self._model, max_tokens, **options)).choices[0].text)

    def stream(
        self, name: str, question: str, max_tokens: int = 64, **options: Any
    ) -> Iterator[str]:
        """Iterate over an answer's text as it arrives; arguments and errors are those of `ask`."""
        asked = request(None, name, question, self._tokenizer)
        yield from (choice.text for choice in self._choices(asked, max_tokens, options))

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
        return ServedConversation(self, name, limit, compact, messages)

    def list(self) -> tuple[Context, ...]:
        """All contexts of the server, including those in the making and failed ones."""
        return tuple(map(Context.of, self._order({"list": True})["contexts"]))

    def delete(self, name: str) -> None:
        """Delete a context and its files; requests that read it continue.

        Raises `StoreError` if there is no such context.
        """
        self._order({"delete": name})

    def _choices(self, asked: Request, max_tokens: int, options: dict[str, Any]) -> Iterator[Any]:
        """The parts of a streamed answer."""
        _check_options(options)
        ended = False
        body = asked.body(self._model, max_tokens, **options, stream=True)
        # If the caller stops reading, the connection closes at once, and the server stops.
        with _refusals(), self._send(body) as pieces:
            for piece in pieces:
                ended = ended or any(choice.finish_reason for choice in piece.choices)
                yield from _ended_by_model(piece.choices)
        if not ended:
            raise StoreError("The connection ended before the answer did. Send it again.")

    def _order(self, order: Mapping[str, Any], ids: Sequence[int] = (0,)) -> dict[str, Any]:
        """The server's reply to an order."""
        # Send numbers that JSON lacks as text: a server parses fractions, and refuses NaN.
        text = json.dumps(order, default=lambda x: x.item() if hasattr(x, "item") else str(x))
        order = json.loads(text, parse_constant=str)
        body = Request("", tuple(ids), None, order, exact="extend" in order).body(self._model, 1)
        # Only a listing may be retried: a passage whose reply was lost would be added twice.
        once = {} if "list" in order else {"max_retries": 0}
        said = getattr(self._send(body, **once), "kv_transfer_params", None) or {}
        if PARAMETER not in said:
            raise StoreError(
                f"The server at {self.url} has no store of contexts. Start it with "
                f"gracekv.vllm.kv_transfer_config(store)."
            )
        return dict(said[PARAMETER])

    def _send(self, body: dict[str, Any], **how: Any) -> Any:
        plain = {name: body.pop(name) for name in ("model", "prompt", "stream") if name in body}
        with _refusals():
            # OpenAI's client does not know all of the other fields.
            sent = self._openai.with_options(**how).completions.create(**plain, extra_body=body)
        if not plain.get("stream"):
            _ended_by_model(sent.choices)
        return sent

    @cached_property
    def _openai(self) -> Any:
        make = required("openai", "vllm").OpenAI
        return make(base_url=self.url, api_key=self.api_key, timeout=self.timeout)

    @cached_property
    def _served(self) -> Any:
        return self._openai.models.list().data[0]

    @property
    def _model(self) -> str:
        return self.model or str(self._served.id)

    @cached_property
    def _tokenizer(self) -> Any:
        if self.tokenizer is not None:
            return self.tokenizer
        return required("transformers", "vllm").AutoTokenizer.from_pretrained(self._served.root)


def _ended_by_model(choices: Sequence[Any]) -> Sequence[Any]:
    """The choices; raises `StoreError` if one was ended by the server instead."""
    if any(choice.finish_reason == "abort" for choice in choices):
        raise StoreError("The server stopped or paused and cut this request short. Send it again.")
    return choices


def _check_options(options: Mapping[str, Any]) -> None:
    if "stream" in options:
        raise ConfigError(
            "Leave stream out: `ask` and `send` return an answer, `stream` iterates over its text."
        )
    if "max_new_tokens" in options:
        raise ConfigError("On a server the length is max_tokens; got max_new_tokens.")
    if any((options.get(x) or 1) != 1 for x in ("n", "best_of")):
        raise ConfigError("One answer is returned: leave out n and best_of; ask again for more.")


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn status 400 and 404 into `StoreError` with the server's reason."""
    try:
        yield
    except required("openai", "vllm").APIError as error:
        said = error.body if isinstance(error.body, dict) else {}
        if said.get("code") not in (400, 404):
            raise
        raise StoreError(str(said.get("message"))) from error
