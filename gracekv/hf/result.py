"""`CompressionResult` and `BatchResult`: compressed prompts to generate from repeatedly."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Unpack, overload

from torch import Tensor

from gracekv.allocate import Budget, BudgetOptions
from gracekv.decode import Compaction, Limit
from gracekv.distributed.agreement import in_step
from gracekv.errors import CacheError, ConfigError, ReportError, expect
from gracekv.hf.base_result import BaseResult
from gracekv.hf.cache import GraceCache
from gracekv.hf.conversation import Conversation
from gracekv.hf.extend import extended_run
from gracekv.hf.generation import check_one
from gracekv.hf.questions import ask_ids
from gracekv.pipeline.run import Run
from gracekv.prefill.options import DEFAULTS, CaptureOptions, trim_memory
from gracekv.prefill.prompt import Prompt


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompressionResult(BaseResult):
    """The result of `compress` for one prompt. It does not hold the prefill.

    Attributes:
        model: the model that the cache belongs to.
        prompts: the compressed prompt, alone.
        pipeline: the pipeline that compressed it, and the backend that reads the cache.
        keep_run: whether `details` are kept.
        runs: the pipeline run of the prompt, alone.
        shared_cache: the cache that every new one continues; never generated on itself.
    """

    is_batch: ClassVar[bool] = False

    @property
    def prompt(self) -> Prompt:
        """The compressed prompt."""
        return self.prompts[0]

    @property
    def run(self) -> Run:
        """The pipeline run; without `keep_run`, with a record in place of the stages' results."""
        return self.runs[0]

    @property
    def details(self) -> Run | None:
        """Partition, relevance, forest and frontier, if compressed with `keep_run=True`."""
        return self.run if self.keep_run else None

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        label: str | None = None,
        answer: str | None = None,
        cache: GraceCache | None = None,
    ) -> None:
        """Write an HTML page that shows what was kept where; see `gracekv.report`.

        The page needs neither network nor other files; it contains the prompt's text. To compare
        several results, use `gracekv.report.compare`.

        Args:
            path: the file; its folder is created.
            label: the result's name on the page; default: the recipe's name and the ratio.
            answer: the model's answer, shown with the accounting.
            cache: the cache that the answer was generated on, made by
                `new_cache(Limit(..., history=True))`; the page then shows what each cut left of it.

        Raises `ReportError` if the result was loaded from a file or extended and holds merged
        entries, whose tokens are no longer known, or if the cache is not one of this result's;
        `CacheError` if it has no history.
        """
        from gracekv.report import write

        takes = "cache takes a cache of result.new_cache(Limit(..., history=True))"
        expect(cache, GraceCache | None, takes, ReportError)
        write(path, self, label=label, answer=answer, cache=cache)

    def generate(
        self, max_new_tokens: int = 64, *, limit: Limit | None = None, **kwargs: Any
    ) -> str:
        """The model's answer as text, greedy unless `kwargs` say otherwise.

        `kwargs` are passed to `model.generate`, `limit` to `new_cache`. Every call starts from the
        compressed prompt, so calls can be repeated. Raises `PromptError` if the prompt has no
        tokenizer, `ConfigError` if `kwargs` ask for more than one sequence.
        """
        _check_one_answer(self.model, kwargs)
        return self._texts(self.generate_ids(max_new_tokens, limit=limit, **kwargs))[0]

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
    @overload
    def ask(
        self, question: Sequence[str], max_new_tokens: int = 64, **kwargs: Any
    ) -> list[str]: ...
    def ask(
        self,
        question: str | Sequence[str],
        max_new_tokens: int = 64,
        *,
        stream: bool = False,
        limit: Limit | None = None,
        **kwargs: Any,
    ) -> str | list[str] | Iterator[str]:
        """Answer questions about a context that was compressed without one.

            prompt = gracekv.Prompt.from_chat(tokenizer, context=text)
            book = gracekv.compress(model, prompt, ratio=4)
            print(book.ask("Who is Dinah?"))

        Only the question's own tokens are read. Every call starts right after the context; use
        `chat` for questions that build on each other.

        Args:
            question: a string, or a list of strings of any lengths, which are answered as one batch
                over the shared context.
            max_new_tokens: maximum tokens of each answer.
            stream: return an iterator over the answer's text instead; for one question.
            limit: the most that each answer's cache may hold; see `new_cache`.
            kwargs: passed to `model.generate`; decoding is greedy unless they say otherwise.

        Returns:
            The answer's text, or a list of them for a list.

        Raises:
            PromptError: the prompt has a question already or no tokenizer; a question is empty, or
                does not fit into the remaining positions.
            ConfigError: `kwargs` ask for several answers, or `stream` is given a list.
        """
        _check_one_answer(self.model, kwargs)
        questions = [question] if isinstance(question, str) else question
        if not stream:
            answers = self._texts(ask_ids(self, questions, max_new_tokens, kwargs, limit))
            return answers[0] if isinstance(question, str) else answers
        if not isinstance(question, str):
            raise ConfigError("stream=True takes one question as text. Ask one after the other.")
        return self.chat(limit).ask(question, max_new_tokens, stream=True, **kwargs)

    def extend(
        self,
        passage: str | Tensor | Sequence[int],
        *,
        capture: CaptureOptions = DEFAULTS,
        **budget: Unpack[BudgetOptions],
    ) -> CompressionResult:
        """Extend the context by `passage`, compressed by the same pipeline.

            book = book.extend(text, ratio=4)

        Only the passage is read, over the packed entries, which do not change, quantised or not;
        this result remains usable. Give exactly one of the five budgets, for the passage alone.
        Meanwhile a copy of the packed entries is held in the model's dtype, each layer's heads
        padded to the longest head.

        Args:
            passage: text, appended as it is, including any separator; or token ids [n].
            capture: how the passage is read: chunks, memory, progress.
            budget: the budget of the passage, as in `gracekv.compress`.

        Raises:
            PromptError: the prompt has a question; the passage is empty, cannot be encoded, or ends
                beyond the positions of the model.
            BudgetError: not exactly one budget is given, or it is too small for the passage.
            CacheError: the passage ends beyond the model's sliding window or where its RoPE
                changes; its attention logits are capped, or its queries scaled by their positions.
            ConfigError: the pipeline runs the model again, which needs the whole context.
            CaptureMemoryError: memory ran out.
            NonFiniteError: as `gracekv.capture` does.
            RankError: as for `gracekv.compress`, on a model whose heads are spread over processes.
        """
        with in_step(self.model):
            prompt, run = extended_run(self, passage, Budget.of(budget), capture)
            result = CompressionResult.from_runs(self.model, [prompt], [run], self.pipeline)
        if capture.trim and self.model.device.type == "cpu":
            trim_memory()
        return result

    def chat(self, limit: Limit | None = None, compact: Compaction | None = None) -> Conversation:
        """Start a conversation about a context that was compressed without a question.

        With `limit`, the cache stays within it, however long the conversation gets; `compact` says
        when older messages are compressed. Raises `PromptError` if the prompt has a question
        already or no tokenizer, and what `new_cache` raises.
        """
        return Conversation(self, limit, compact)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BatchResult(BaseResult):
    """The result of `compress` for a list of prompts, each with its own budget.

    `batch[0]` is the first prompt's result over the same entries, to ask or save separately.

    Attributes:
        model: the model that the cache belongs to.
        prompts: the compressed prompts, in order.
        pipeline: the pipeline that compressed them, and the backend that reads the cache.
        keep_run: whether `details` are kept.
        runs: the pipeline run of each prompt.
        shared_cache: the cache that every new one continues; never generated on itself.
    """

    is_batch: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, number: int) -> CompressionResult:
        """The result of one prompt, over the same entries; it holds the whole batch."""
        own = [self.prompts[index(number)]], [self.runs[number]], self.pipeline
        return CompressionResult.from_runs(self.model, *own, keep_run=self.keep_run)

    @property
    def details(self) -> tuple[Run, ...] | None:
        """The pipeline run of each prompt, if compressed with `keep_run=True`."""
        return self.runs if self.keep_run else None

    def report(
        self, path: str | os.PathLike[str], *, answers: Sequence[str] | None = None
    ) -> tuple[Path, ...]:
        """Write a page per prompt: page-1.html, page-2.html, ... for the path page.html.

        Returns their paths. `answers` are the model's answers, one per prompt. Raises
        `ReportError` as `CompressionResult.report` does.
        """
        from gracekv.report import write_all

        return write_all(path, self, answers=answers)

    def generate(
        self, max_new_tokens: int = 64, *, limit: Limit | None = None, **kwargs: Any
    ) -> list[str]:
        """The model's answer to each prompt as text, greedy unless `kwargs` say otherwise.

        `kwargs` are passed to `model.generate`, `limit` to `new_cache`. With
        num_return_sequences=n, the list holds n answers to the first prompt, then n to the second.
        Raises `PromptError` if a prompt has no tokenizer.
        """
        return self._texts(self.generate_ids(max_new_tokens, limit=limit, **kwargs))


def _is_no_cache(self: Any, *_: object) -> NoReturn:
    """Raises `CacheError`; transformers calls this if it is given a result as the cache."""
    raise CacheError("A result is immutable and not a cache. Pass the model result.new_cache().")


# A frozen dataclass defines `__setattr__` itself, so ours is set afterwards.
for _kind in (CompressionResult, BatchResult):
    _kind.__setattr__ = _kind.get_seq_length = _is_no_cache  # type: ignore


def _check_one_answer(model: Any, options: dict[str, Any]) -> None:
    rule = "One text is returned for each prompt or question"
    advice = "Use generate_ids and decode its rows."
    check_one(model, options, ["num_return_sequences"], rule, advice)
