"""`Client`: compresses documents in a vLLM server and asks about them, over OpenAI's client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gracekv.errors import StoreError, required
from gracekv.vllm.documents import document
from gracekv.vllm.header import PARAMETER
from gracekv.vllm.requests import Request, request

# Seconds between two looks at a context that is being made. Source: ours.
_LOOK = 0.2


@dataclass(frozen=True, slots=True)
class Context:
    """A context as the server lists it; what it does not say, or not yet, is None.

    Attributes:
        name: by which it is asked.
        state: "compressing", "ready" or "failed".
        length: tokens of the document.
        entries: of all layers and heads together.
        bytes: of keys and values.
        ratio: how many times fewer entries than a full cache has.
        seconds: from its first token until it was ready.
        recipe: the pipeline's name.
        saved: whether it lies in the store's folder too.
        reason: why it failed.
        recorded_bytes: held of its document at the most, while it was read and compressed.
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
        """From a server's reply, whatever else it says."""
        return cls(**{name: said[name] for name in cls.__slots__ if name in said})


@dataclass(frozen=True)
class Client:
    """A vLLM server with gracekv's connector, as its users see it.

    `client.compress("book", text, ratio=4)`, then `client.ask("book", "Who is Dinah?")`. What the
    server refuses (status 400 or 404) is a `StoreError` with its reason; other errors are those of
    OpenAI's client.

    Attributes:
        url: where the server's API begins.
        model: the name under which the model is served; None: the server's first.
        tokenizer: of the served model; None: loaded from where the server has the model from.
        api_key: if the server asks for one.
        timeout: seconds that a request, or a context that is being made, may take.
    """

    url: str = "http://localhost:8000/v1"
    model: str | None = None
    tokenizer: Any = None
    api_key: str = "none"
    timeout: float = 600.0

    def compress(
        self, name: str, text: str | Sequence[int], *, wait: bool = True, **options: Any
    ) -> Context:
        """Make a document a context of that name; one that exists is replaced.

        Args:
            name: for `ask`.
            text: the document, which is put into the chat format; or token ids, taken as they are.
            wait: whether to return once it is ready; else look at `list` later.
            options: one of `ratio` (how many times fewer entries), `entries_per_head` and
                `kv_bytes`; and `recipe` (a pipeline's name), `save=True` (into the store's folder
                too) and `expires` (seconds that it stays), where the server's are not meant.

        Raises:
            StoreError: the server refuses the document, or it fails, or is late.
            PromptError: the text is empty or the chat template changes it.
            MissingDependencyError: openai is not installed, or transformers if it is needed.
        """
        ids = document(self._tokenizer, text) if isinstance(text, str) else text
        end = time.monotonic() + self.timeout
        made = Context.of(self._order({"compress": {"name": name, **options}}, ids))
        while wait:
            made = next((one for one in self.list() if one.name == name), made)
            if made.state == "ready":
                break
            if made.state == "failed" or time.monotonic() > end:
                reason = made.reason or f"Wait longer than {self.timeout:g} s (timeout=...)."
                raise StoreError(f"The context {name!r} is {made.state}. {reason}")
            time.sleep(_LOOK)
        return made

    def ask(self, name: str, question: str, max_tokens: int = 64, **options: Any) -> str:
        """The answer to a question about a context, greedy unless `options` say otherwise.

        Args:
            name: the context's.
            question: a text.
            max_tokens: most tokens of the answer.
            options: more fields of `POST /v1/completions`, such as temperature=0.7.

        Raises:
            StoreError: the server has no such context, or cannot use it.
            PromptError: the question is empty.
            MissingDependencyError: openai is not installed, or transformers if it is needed.
        """
        return str(self._ask(name, question, max_tokens, options).choices[0].text)

    def stream(
        self, name: str, question: str, max_tokens: int = 64, **options: Any
    ) -> Iterator[str]:
        """The pieces of an answer as they come; arguments and errors are those of `ask`."""
        with _refusals():
            for piece in self._ask(name, question, max_tokens, {**options, "stream": True}):
                yield from (choice.text for choice in piece.choices)

    def list(self) -> tuple[Context, ...]:
        """All contexts of the server, those that are being made or failed too."""
        return tuple(map(Context.of, self._order({"list": True})["contexts"]))

    def delete(self, name: str) -> None:
        """Delete a context, its files too; requests that read it go on.

        Raises `StoreError` if there is none of that name.
        """
        self._order({"delete": name})

    def _ask(self, name: str, question: str, max_tokens: int, options: dict[str, Any]) -> Any:
        asked = request(None, name, question, self._tokenizer)
        return self._send(asked.body(self._model, max_tokens, **options))

    def _order(self, order: Mapping[str, Any], ids: Sequence[int] = (0,)) -> dict[str, Any]:
        """What the server says to a request that asks for no answer."""
        body = Request("", tuple(ids), None, order).body(self._model, 1)
        said = getattr(self._send(body), "kv_transfer_params", None) or {}
        if PARAMETER not in said:
            raise StoreError(
                f"The server at {self.url} says nothing of contexts. Start it with the connector "
                f"of gracekv.vllm.kv_transfer_config(store)."
            )
        return dict(said[PARAMETER])

    def _send(self, body: dict[str, Any]) -> Any:
        plain = {name: body.pop(name) for name in ("model", "prompt", "stream") if name in body}
        with _refusals():
            # The other fields are not all known to OpenAI's client.
            return self._openai.completions.create(**plain, extra_body=body)

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
        made = required("transformers", "vllm").AutoTokenizer
        return made.from_pretrained(self._served.root)


@contextmanager
def _refusals() -> Iterator[None]:
    """`StoreError` with the server's reason in the place of its status 400 and 404."""
    try:
        yield
    except required("openai", "vllm").APIError as error:
        said = error.body if isinstance(error.body, dict) else {}
        if said.get("code") not in (400, 404):
            raise
        raise StoreError(str(said.get("message"))) from error
