"""`Worker`: runs one sample through all its cells, on one prefill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from operator import or_
from typing import Any

from gracekv import compress
from gracekv.allocate import Budget
from gracekv.decode import Limit
from gracekv.errors import TaskError
from gracekv.evaluate.answers import AnswerOutputs, compare, greedy, teacher_force
from gracekv.evaluate.experiment import Cell, Panel, PendingSample
from gracekv.evaluate.long_outputs import EVERY
from gracekv.evaluate.metrics import score
from gracekv.evaluate.rendering import Rendered, joint_digest, render_questions
from gracekv.evaluate.row_fields import (
    cost_fields,
    error_fields,
    identity,
    known_fields,
    over_questions,
)
from gracekv.evaluate.row_files import Row
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.tasks import LONG, Task
from gracekv.hf.capture import capture
from gracekv.hf.result import CompressionResult
from gracekv.pipeline import Pipeline
from gracekv.prefill import Needs, Prefill
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.prompt import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """The data that all cells of one sample share.

    `full` holds FullKV's outputs for the reference answers, if they are compared; `about` the
    fields of the sample's rows; `compressed` is the prefilled prompt: the whole one, or the part
    before the question.
    """

    questions: tuple[Rendered, ...]
    full: tuple[AnswerOutputs, ...]
    about: dict[str, Any]
    compressed: Prompt
    prefill: Prefill


class Worker:
    """A loaded model that turns samples into rows.

    Args:
        name: the experiment's name for the model.
        dtype: the experiment's name for its dtype.
        model: a transformers causal language model of a tested family, in evaluation mode.
        tokenizer: the model's.
        sources: where texts come from.
    """

    def __init__(self, name: str, dtype: str, model: Any, tokenizer: Any, sources: Sources) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.sources = sources
        marks = {k: v for k, v in fingerprint(model, tokenizer).items() if k != "model_name"}
        # The fields of every row about the model.
        self.named: dict[str, Any] = {"model": name, "dtype": dtype, "marks": marks}

    def longest_prompt(self, panel: Panel, task: Task) -> int:
        """Most prompt tokens of a sample: the panel's, or the model's positions less the answer."""
        if panel.max_prompt is not None:
            return panel.max_prompt
        positions = int(getattr(self.model.config, "max_position_embeddings", 1 << 30))
        return positions - _cap(panel, task)

    def rows(self, pending: PendingSample) -> Iterator[Row]:
        """One row for each cell, as soon as it is there; a failure is a row with an `error`.

        If earlier rows of this sample have another prompt hash, the data have changed and the
        sample fails, because its rows could not be compared.
        """
        panel, task, index, cells = pending.panel, pending.task, pending.index, pending.cells
        sample = identity(self.named["model"], self.named["dtype"], panel, task, index)
        known = [{**known_fields(sample, task.group, cell), **self.named} for cell in cells]
        try:
            prepared = self._prepare(pending)
        except Exception as error:
            yield from ({**row, **error_fields(error)} for row in known)
            return
        for row, cell in zip(known, cells, strict=True):
            try:
                yield {**row, **prepared.about, **self._measure(panel, task, prepared, cell)}
            except Exception as error:
                yield {**row, **prepared.about, **error_fields(error)}

    def _prepare(self, pending: PendingSample) -> _Prepared:
        panel, task, index = pending.panel, pending.task, pending.index
        sample = task.sample(index, self.sources, self.tokenizer)
        limits = self.longest_prompt(panel, task), panel.truncate, panel.answer_words
        rendered = render_questions(sample, self.tokenizer, *limits)
        digest = joint_digest(rendered)
        if pending.prompt_hash not in (None, digest):
            raise TaskError(
                f"Sample {index} of {task.name} is not the one that earlier rows in this folder "
                f"are about: data or tokenizer have changed. Use a new folder."
            )
        compressed = rendered[0].prompt
        if panel.protocol == "query_agnostic":
            spans = compressed.spans
            # One token after the context stays: the last token of a prompt is fed again and
            # carries no entry, so the context is compressed to its very end.
            compressed = Prompt.from_ids(
                compressed.ids[: spans.context_end + 1],
                (spans.context_start, spans.context_end),
                question_end=spans.context_end,
                tokenizer=self.tokenizer,
            )
        needs = reduce(or_, (cell.pipeline.needs() for cell in pending.cells), Needs())
        prefill = capture(self.model, compressed, needs)
        full: list[AnswerOutputs] = []
        if panel.fidelity:
            kept = compress(self.model, compressed, prefill=prefill, ratio=1, pipeline="fullkv")
            full = [
                teacher_force(self.model, one.prompt.ids, one.answer_ids, kept.new_cache())
                for one in rendered
            ]
        answers = [list(question.sample.answers) for question in rendered]
        about = {
            "prompt_hash": digest,
            "source": task.source(self.sources),
            "prompt_tokens": rendered[0].prompt.spans.length,
            "context_tokens": rendered[0].prompt.spans.context_length,
            "removed_tokens": rendered[0].removed,
            "answers": answers[0] if len(answers) == 1 else answers,
            "metric": sample.metric,
        }
        return _Prepared(rendered, tuple(full), about, compressed, prefill)

    def _measure(self, panel: Panel, task: Task, prepared: _Prepared, cell: Cell) -> dict[str, Any]:
        pipeline, spans = cell.pipeline, prepared.questions[0].prompt.spans
        budget, limit = cell.budget or Budget.ratio(1), None
        if task.name in LONG and cell.budget is not None:
            budget, limit = _within(cell.budget, prepared, pipeline)
        # Compressed once, however many questions there are.
        given, prefill = prepared.compressed, prepared.prefill
        result = compress(self.model, given, prefill=prefill, pipeline=pipeline, budget=budget)
        asked = zip_longest(prepared.questions, prepared.full)
        measured = [self._ask(panel, task, one, full, result, limit) for one, full in asked]
        costs = cost_fields(result.accounting, result.timings, spans)
        return {**costs, **(measured[0] if len(measured) == 1 else over_questions(measured))}

    def _ask(
        self,
        panel: Panel,
        task: Task,
        question: Rendered,
        full: AnswerOutputs | None,
        result: CompressionResult,
        limit: Limit | None,
    ) -> dict[str, Any]:
        """Fidelity and answer of one question over the compressed cache."""
        measured: dict[str, Any] = {}
        ids, answer = question.prompt.ids, question.answer_ids
        if full is not None:
            cache = result.new_cache(limit)
            forced = teacher_force(self.model, ids, answer, cache)
            measured["fidelity"] = compare(forced, full, answer)
            if limit is not None:
                steps = range(0, len(answer), limit.every)
                measured["by_interval"] = [
                    compare(forced.part(one), full.part(one), answer[one])
                    for one in (slice(first, first + limit.every) for first in steps)
                ]
        if panel.generate:
            sample, cache, cap = question.sample, result.new_cache(limit), _cap(panel, task)
            text, tokens, seconds = greedy(self.model, self.tokenizer, ids, cache, sample, cap)
            scores = score(sample, text)
            measured |= {
                "prediction": text,
                "score": scores[sample.metric],
                "scores": scores,
                "new_tokens": tokens,
                "ms_per_token": 1000 * seconds / tokens,
            }
        return measured


def _within(budget: Budget, prepared: _Prepared, pipeline: Pipeline) -> tuple[Budget, Limit]:
    """The context's budget and the limit of prompt and answer, where `budget` counts both.

    The rest of the prompt and the last tokens come first; context and answer share the remaining
    limit equally, whatever the strategy (ours).
    """
    rendered, window = prepared.questions[0], 16
    prompt, context = len(rendered.prompt.ids), rendered.prompt.spans.context_length
    exact = budget.kind == "entries_per_head"
    length = prompt + len(rendered.answer_ids)
    entries = int(budget.amount) if exact else int(length / budget.amount)
    limit = Limit(entries_per_head=entries, every=EVERY, window=window, strategy=pipeline.decode)
    left = max(pipeline.window.minimum, (entries - window - (prompt - context)) // 2)
    return Budget.entries_per_head(min(left, context)), limit


def _cap(panel: Panel, task: Task) -> int:
    return min(task.max_new_tokens, panel.max_new_tokens or task.max_new_tokens)
