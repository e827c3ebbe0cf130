"""`Server`: a vLLM server as clients use it, over OpenAI's client; `Context`, as it lists one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gracekv.errors import ConfigError, PromptError, StoreError, required
from gracekv.prefill.prompt import checked_ids
from gracekv.vllm.header import PARAMETER
from gracekv.vllm.requests import Request

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


@dataclass(frozen=True, repr=False)
class Server:
    """Takes orders and questions; errors are those of `Client`.

    Attributes:
        client: the `Client`, whose fields are read.
    """

    client: Any

    def __getstate__(self) -> dict[str, Any]:
        # Without OpenAI's client, which cannot be pickled.
        return {"client": self.client}

    @cached_property
    def _openai(self) -> Any:
        make, own = required("openai", "vllm").OpenAI, self.client
        return make(base_url=own.url, api_key=own.api_key, timeout=own.timeout)

    @cached_property
    def _served(self) -> Any:
        return self._openai.models.list().data[0]

    @cached_property
    def tokenizer(self) -> Any:
        """The given tokenizer, or that of the served model."""
        if self.client.tokenizer is not None:
            return self.client.tokenizer
        return required("transformers", "vllm").AutoTokenizer.from_pretrained(self._served.root)

    def order(self, order: Mapping[str, Any], ids: Sequence[int] = (0,)) -> dict[str, Any]:
        """The server's reply to an order; see `gracekv.vllm.orders`.

        Raises `StoreError` if the server refuses it or has no store.
        """
        # Send numbers that JSON lacks as text: a server parses fractions, and refuses NaN.
        text = json.dumps(order, default=lambda x: x.item() if hasattr(x, "item") else str(x))
        order = json.loads(text, parse_constant=str)
        sent = Request("", tuple(ids), None, order, exact="extend" in order)
        # Only a listing may be retried: a passage whose reply was lost would be added twice.
        once = {} if "list" in order else {"max_retries": 0}
        said = getattr(self._send(sent, 1, {}, **once), "kv_transfer_params", None) or {}
        if PARAMETER not in said:
            raise StoreError(
                f"The server at {self.client.url} has no store of contexts. Start it with "
                f"gracekv.vllm.kv_transfer_config(store)."
            )
        return dict(said[PARAMETER])

    def make(self, order: Mapping[str, Any], ids: Sequence[int], wait: bool) -> Context:
        """Have a context made of token ids, and with `wait` wait until it is ready.

        Raises `PromptError` without ids, `StoreError` if it is refused, or fails or takes too long.
        """
        if not (ids := checked_ids(ids).tolist()):
            raise PromptError("The document or passage is empty: there is nothing to read.")
        made = Context.of(self.order(order, ids))
        if wait:
            made = self.wait(made.name)
            if made.state != "ready":
                reason = made.reason or f"Wait longer than {self.client.timeout:g} s (timeout=...)."
                raise StoreError(f"The context {made.name!r} is {made.state}. {reason}")
        return made

    def find(self, name: str) -> Context:
        """The context as the server lists it now, or one whose state is "gone"."""
        gone = Context(name, "gone", reason="It expired or was deleted.")
        return next(map(Context.of, self.order({"list": name})["contexts"]), gone)

    def wait(self, name: str) -> Context:
        """The context once it is made or "gone", or as it is after `timeout`."""
        end = time.monotonic() + self.client.timeout
        while (made := self.find(name)).state == "compressing" and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return made

    def answer(self, asked: Request, max_tokens: int, options: Mapping[str, Any]) -> str:
        """The text of an answer; `options` are more fields of `POST /v1/completions`."""
        return str(self._send(asked, max_tokens, options).choices[0].text)

    def choices(self, asked: Request, max_tokens: int, options: Mapping[str, Any]) -> Iterator[Any]:
        """The parts of a streamed answer; arguments are those of `answer`.

        Raises `StoreError` if the server refuses or ends it.
        """
        ended = False
        # If the caller stops reading, the connection closes at once, and the server stops.
        with _refusals(), self._send(asked, max_tokens, {**options, "stream": True}) as pieces:
            for piece in pieces:
                ended = ended or any(choice.finish_reason for choice in piece.choices)
                yield from _ended_by_model(piece.choices)
        if not ended:
            raise StoreError("The connection ended before the answer did. Send it again.")

    def _send(self, asked: Request, max_tokens: int, options: Mapping[str, Any], **how: Any) -> Any:
        body = asked.body(self.client.model or str(self._served.id), max_tokens, **options)
        plain = {name: body.pop(name) for name in ("model", "prompt", "stream") if name in body}
        with _refusals():
            # OpenAI's client does not know all of the other fields.
            sent = self._openai.with_options(**how).completions.create(**plain, extra_body=body)
        if not plain.get("stream"):
            _ended_by_model(sent.choices)
        return sent


def _ended_by_model(choices: Sequence[Any]) -> Sequence[Any]:
    """The choices; raises `StoreError` if one was ended by the server instead."""
    if any(choice.finish_reason == "abort" for choice in choices):
        raise StoreError("The server stopped or paused and cut this request short. Send it again.")
    return choices


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that an answer's methods have in another form."""
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
