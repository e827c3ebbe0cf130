"""`Conversation`: turns about a compressed context."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from gracekv.allocate import Budget, BudgetOptions
from gracekv.cache import Occupancy
from gracekv.decode import Compaction, Limit
from gracekv.distributed import head_shard
from gracekv.errors import CacheError, ConfigError, PromptError, expect, one_of
from gracekv.hf.base_result import BaseResult
from gracekv.hf.cache import GraceCache
from gracekv.hf.extend import check_extends, extended_by, passage_sizes
from gracekv.hf.generation import answer_ids, check_one, decode_rows, stream_text
from gracekv.hf.questions import check_context, check_room
from gracekv.precision import FullPrecision
from gracekv.prefill.chat_text import Message
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.history import History
from gracekv.prefill.length_limits import trained_length
from gracekv.prefill.options import DEFAULTS, CaptureOptions
from gracekv.prefill.prompt import check_begins
from gracekv.prefill.supported import check_needs


class Conversation(AbstractContextManager["Conversation"]):
    """Turns about one compressed context: each reads its own tokens only.

        with book.chat() as chat:
            print(chat.ask("Who is Dinah?"))
            print(chat.ask("And whose cat is she?"))

    All conversations share the packed context, which never changes. Turns stay uncompressed until
    `compress` is called or the limit is reached. A turn that fails, or whose stream is closed
    early, is undone. Use it from one thread at a time.
    """

    def __init__(
        self, result: BaseResult, limit: Limit | None = None, compact: Compaction | None = None
    ) -> None:
        """Begin after the context of `result`; stay within `limit`, and compress as `compact` says.

        Raises `PromptError` as `result.ask` does, `CacheError` if the model has changed,
        `ConfigError` if `compact` is not a `Compaction` or the recipe keeps everything, what
        `result.new_cache(limit)` raises, and with `compact` what `extend` raises for a model or
        recipe that it does not support.
        """
        check_context(result.prompts[0])
        expect(compact, Compaction | None, "compact takes a gracekv.Compaction(after=..., ratio=4)")
        result.check_model(fingerprint)
        if compact is not None:
            kept = result.pipeline
            if kept.keep_all and (limit or isinstance(kept.precision, FullPrecision)):
                raise ConfigError(
                    "A conversation compresses by its context's recipe, and this one keeps "
                    "everything. To keep the context whole, compress it by another at ratio=1."
                )
            check_extends(result.model)
            check_needs(result.model, result.pipeline.needs(), passage=True)
        self._closed, self._limit, self._compact = False, limit, compact
        self._first, self._lock = result, threading.Lock()
        self._model, self._prompt = result.model, result.prompts[0]
        self._begin_after(result, History())

    def _begin_after(self, result: Any, history: History) -> None:
        """Continue on a new cache, over the entries of `result`."""
        # First, since it raises if the limit is too small: nothing has changed by then.
        self._cache: GraceCache = result.new_cache(self._limit)
        self._result, self._history = result, history

    @overload
    def ask(
        self, question: str, max_new_tokens: int = 64, *, stream: Literal[True], **kwargs: Any
    ) -> Iterator[str]: ...
    @overload
    def ask(
        self,
        question: str,
        max_new_tokens: int = 64,
        *,
        stream: Literal[False] = ...,
        **kwargs: Any,
    ) -> str: ...
    @overload
    def ask(
        self, question: str, max_new_tokens: int = 64, *, stream: bool, **kwargs: Any
    ) -> str | Iterator[str]: ...
    def ask(
        self, question: str, max_new_tokens: int = 64, *, stream: bool = False, **kwargs: Any
    ) -> str | Iterator[str]:
        """The model's answer to the next question, greedy unless `kwargs` say otherwise.

        Args:
            question: the user's turn.
            max_new_tokens: maximum tokens of the answer.
            stream: return an iterator over the answer's text instead; the turn joins the
                conversation once the iterator is exhausted.
            kwargs: passed to `model.generate`.

        Raises:
            PromptError: the question is empty, or does not fit into the remaining positions.
            CacheError: the conversation is closed, another thread is in the middle of a turn, or
                the model's dtype or active adapters have changed.
            ConfigError: `kwargs` ask for beams or several answers, from which a conversation cannot
                continue.
        """
        self._check_alone(kwargs)
        asked = self._history.with_question(question, self._prompt.messages)
        turn = asked, self._history.tools, max_new_tokens, kwargs
        return self._stream(*turn) if stream else self._answer(*turn)

    def send(
        self,
        messages: Sequence[Message],
        max_new_tokens: int = 64,
        *,
        tools: Sequence[Any] | None = None,
        edited: Literal["refuse", "compress"] = "refuse",
        **kwargs: Any,
    ) -> str:
        """The model's answer to a history of messages, of which only the new ones are read.

        The model's own chat template renders them. An answer that calls tools may be sent back as
        `tool_calls`, before the messages of role "tool" with the results.

        Args:
            messages: all messages in OpenAI's format. They start with those of the context if it
                was made by `Prompt.from_messages`; otherwise they continue its turn.
            max_new_tokens: maximum tokens of the answer.
            tools: the tools of the context, the same in each call.
            edited: if a message differs from the one that was read, "compress" restarts after the
                context and compresses older messages as `compact` says; "refuse" raises.
            kwargs: passed to `model.generate`.

        Raises what `ask` raises, `EditedHistoryError` for an edited history, and `ConfigError` if
        `edited` is neither.
        """
        self._check_alone(kwargs)
        one_of("edited", edited, ("refuse", "compress"))
        anew = edited == "compress" and bool(self._history.edit(messages, tools))
        return self._answer(messages, tools, max_new_tokens, kwargs, anew=anew)

    def _answer(
        self, messages: Any, tools: Any, most: int, options: Any, *, anew: bool = False
    ) -> str:
        with self._turn(messages, tools, most, anew=anew) as (answer, turn):
            return self._add(messages[-1], turn, answer(options))

    def compress(
        self, *, capture: CaptureOptions = DEFAULTS, **budget: Unpack[BudgetOptions]
    ) -> None:
        """Compress the turns so far, which are read once more, behind the packed context.

        This keeps a long conversation within a budget: chat.compress(ratio=2). Later turns work as
        before.

        Args:
            capture: how the turns are read, as in `CompressionResult.extend`.
            budget: the turns' budget, as in `gracekv.compress`.

        Raises what `extend` raises, `CacheError` as `ask` does, and `PromptError` if no
        uncompressed turn is left.
        """
        with self._alone():
            if not (turns := self._history.uncompressed):
                raise PromptError("No turn is left to compress. Ask something first.")
            total = Budget.of(budget)
            parts = [len(turns)]
            if total.kind == "ratio":  # another budget is one for all parts
                parts = passage_sizes(self._model, self._limit, len(turns))
            runs = [(n, {"capture": capture, "budget": total}) for n in parts]
            result = extended_by(self._result, self._limit, turns, runs)
            self._begin_after(result, self._history.compressed(len(turns)))

    @property
    def messages(self) -> list[Message]:
        """A copy of the turns so far: {"role": "user", "content": text}, or as passed to `send`."""
        return deepcopy(list(self._history.messages))

    @property
    def accounting(self) -> Occupancy:
        """Entries and bytes of context and turns, now and at the peak since the last compression.

        After `close`, those of the context.
        """
        return self._cache.accounting

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the context's report; with `Limit(history=True)` it also shows the turns' entries.

        After `close` it is the report of the context that the conversation began with.

        Raises what `result.report` raises.
        """
        noted = self._limit is not None and self._limit.history and not self._closed
        self._result.report(path, cache=self._cache if noted else None)

    def close(self) -> None:
        """Release the cache; a further question raises `CacheError`."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            self._let_go()
            self._lock.release()

    def _let_go(self) -> None:
        # This frees turns compressed meanwhile and copies for a limit, which nothing else holds.
        self._result, self._cache = self._first, self._first.shared_cache

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raises `CacheError`: a copy would write to the same cache."""
        raise CacheError(
            "A conversation cannot be copied or pickled. Begin another with result.chat()."
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        turns = sum(message["role"] == "user" for message in self._history.messages)
        return f"Conversation({turns} turns, {len(self._ids):,} tokens{state})"

    def _stream(self, messages: Any, tools: Any, most: int, options: Any) -> Iterator[str]:
        answers = list[Tensor]()
        with self._turn(messages, tools, most) as (answer, turn):
            answered = self._answered

            def generate(chosen: dict[str, Any]) -> None:
                try:
                    answers.append(answer(chosen))
                finally:
                    answered.set()

            pieces = stream_text(self._prompt.tokenizer, generate, options, head_shard(self._model))
            answered.clear()
            yield from pieces
            self._add(messages[-1], turn, answers[0])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise CacheError(
                "Another turn of this conversation is being answered, in another thread or by an "
                "open stream. Wait for it, or begin a conversation of its own with result.chat()."
            )
        try:
            self._check_open()
            yield
        finally:
            if self._closed:  # meanwhile
                self._let_go()
            self._lock.release()

    def _new_turns(self, messages: Any, tools: Any) -> list[tuple[str, list[int]]]:
        """Role and ids of each message not read yet; raises as `new_turns` does."""
        prompt, history = self._prompt, self._history
        if prompt.messages and not history.messages:
            check_begins(prompt, messages, tools)
        how: Any = {"separator": prompt.separator, "template": prompt.template}
        return history.new_turns(prompt.tokenizer, messages, tools, prompt.messages, **how)

    @contextmanager
    def _turn(
        self, messages: Any, tools: Any, most: int, *, anew: bool = False
    ) -> Iterator[tuple[Callable[[dict[str, Any]], Tensor], list[int]]]:
        """The function that answers with given options, and the last turn's ids.

        An error inside undoes the turn.
        """
        with self._alone():
            self._first.check_model()
            history, before, undo = self._history, (self._result, self._cache), self._cache.mark()
            # Unset while a stream's thread answers.
            self._answered = answered = threading.Event()
            answered.set()
            try:
                if anew:
                    self._begin_after(self._first, History())
                *older, (_, turn) = self._new_turns(messages, tools)
                self._history = self._history.with_turns(messages[:-1], tools, older)
                self._compress_older()
                ids = torch.cat([self._ids, self._prompt.ids.new_tensor(turn)])
                check_room(self._model, self._result.prompts[0], len(ids), most, self._limit)
                tokenizer = self._prompt.tokenizer
                yield partial(answer_ids, self._model, ids, self._cache, tokenizer, most), turn
            except BaseException:
                written = self._cache
                # A compression that failed is not tried again at once.
                self._history = history if anew else replace(history, failed=self._history.failed)
                self._result, self._cache = before
                if answered.is_set() or self._cache is not written:
                    undo()
                else:
                    # The thread keeps writing to it until its next token.
                    self._cache = self._cache.with_empty_tail()
                raise

    def _compress_older(self) -> None:
        """Compress older messages if it is time; newer ones are read again with the next turn."""
        # Entries of a recent window may be wider than the 16 bits that a ratio counts.
        wide = max(2, self._model.dtype.itemsize // 2)
        least = wide * max(4, self._result.pipeline.window.minimum)
        history, turns = self._history, self._history.uncompressed
        if not (runs := history.due(self._compact, least)):
            return
        self._history = replace(history, failed=len(turns))
        # A context longer than the model supports may be extended, as by turns.
        beyond = self._prompt.spans.context_end > (trained_length(self._model) or sys.maxsize)
        capture, parts = CaptureOptions(beyond_positions=beyond), list[Any]()
        for size, most in runs:
            for n in passage_sizes(self._model, self._limit, size):
                ratio = min(most, max(1.0, n / least))
                # A ratio of 1 may count bytes in 16 bits, into which wider numbers do not fit.
                budget = {"entries_per_head": n} if ratio == 1 else {"ratio": ratio}
                parts.append((n, {"capture": capture, **budget}))
        result = extended_by(self._result, self._limit, turns, parts)
        self._begin_after(result, history.compressed(sum(tokens for tokens, _ in runs)))

    @property
    def _ids(self) -> Tensor:
        """int64 [T], the ids of the context and of all turns."""
        context = self._prompt.ids[: self._prompt.spans.context_end]
        return torch.cat([context, context.new_tensor(self._history.ids)])

    def _add(self, message: Message, turn: list[int], answer: Tensor) -> str:
        """Make the turn part of the conversation; returns the answer's text."""
        [text] = decode_rows(self._prompt.tokenizer, answer[None])
        history, said = self._history, {"role": "assistant", "content": text}
        turns = [(message["role"], turn), ("assistant", answer.tolist())]
        self._history = history.with_turns([*history.messages, message, said], history.tools, turns)
        return text

    def _check_alone(self, options: dict[str, Any]) -> None:
        self._check_open()
        rule = "A conversation continues from one answer"
        advice = "Use result.ask, whose questions are independent."
        check_one(self._model, options, ["num_beams", "num_return_sequences"], rule, advice)

    def _check_open(self) -> None:
        if self._closed:
            raise CacheError("This conversation is closed. Begin another with result.chat().")
