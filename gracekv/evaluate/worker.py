"""`Worker`: runs one sample through all its cells, on one prefill, and makes their rows."""

from __future__ import annotations

import hashlib
import json
import platform
import traceback
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial, reduce
from importlib.metadata import version
from itertools import repeat
from operator import or_
from typing import Any, NamedTuple

import torch

from gracekv import compress
from gracekv.allocate import Budget
from gracekv.errors import TaskError
from gracekv.evaluate.answers import AnswerOutputs, compare, greedy, teacher_force
from gracekv.evaluate.experiment import Cell, Panel, PendingSample
from gracekv.evaluate.long_outputs import within
from gracekv.evaluate.metrics import score
from gracekv.evaluate.row_files import Row
from gracekv.evaluate.sample import Rendered, joint_digest, render_questions
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.tasks import LONG, Task
from gracekv.files import VERSION
from gracekv.hf.capture import capture
from gracekv.hf.result import CompressionResult
from gracekv.prefill import Needs, Prefill
from gracekv.prefill.chat_text import has_chat_template, turn_change, with_date
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.length_limits import trained_length
from gracekv.prefill.prompt import Prompt


class _Prepared(NamedTuple):
    """The data that all cells of one sample share.

    `full` holds FullKV's outputs for the reference answers, if they are compared, `about` the
    fields of the sample's rows, and `compressed` the prefilled prompt: the whole prompt, or the
    part before the question.
    """

    questions: tuple[Rendered, ...]
    full: list[AnswerOutputs]
    about: dict[str, Any]
    compressed: Prompt
    prefill: Prefill


class Worker:
    """A loaded model that turns samples into rows.

    Args:
        name: the experiment's name for the model.
        dtype: the experiment's name for its dtype.
        model: a transformers causal language model of a tested family, in evaluation mode.
        tokenizer: the model's tokenizer.
        sources: the sources of texts.
        day: ISO date that chat templates show as today's, so that a run continues on another day.
    """

    def __init__(
        self, name: str, dtype: str, model: Any, tokenizer: Any, sources: Sources, day: str
    ) -> None:
        self.model, self.tokenizer, self.sources = model, copy(with_date(tokenizer, day)), sources
        if getattr(tokenizer, "chat_template", None):
            # A thought would take up all tokens of a short answer.
            apply = partial(self.tokenizer.apply_chat_template, enable_thinking=False)
            self.tokenizer.apply_chat_template = apply
        # Rows of a continued run must have the same marks; earlier versions lack the last two.
        beside = ("model_name", "config_fields", "plain_weights")
        marks = {k: v for k, v in fingerprint(model, tokenizer).items() if k not in beside}
        # The fields of every row about the model.
        self.named: dict[str, Any] = {"model": name, "dtype": dtype, "marks": marks, "day": day}

    def longest_prompt(self, panel: Panel, task: Task) -> int:
        """Maximum prompt tokens: the panel's, or the model's positions minus the answer."""
        if panel.max_prompt is not None:
            return panel.max_prompt
        return (trained_length(self.model) or 1 << 30) - _cap(panel, task)

    def rows(self, pending: PendingSample) -> Iterator[Row]:
        """One row for each cell, as soon as it is measured; a failure is a row with an `error`.

        If earlier rows of this sample have another prompt hash, the data have changed and the
        sample fails, because its rows could not be compared. If the shared prefill fails, each cell
        is tried separately, since the strategy of one may be at fault.
        """
        panel, task, index, cells = pending.panel, pending.task, pending.index, pending.cells
        sample = identity(self.named["model"], self.named["dtype"], panel, task, index)
        facts = [
            {
                **cell_fields(sample, cell),
                **sample,
                "sample": sample_key(sample),
                "group": task.group,
                "budget": None if cell.budget is None else cell.budget.kind,
                "versions": versions(),
                "written": datetime.now(UTC).isoformat(timespec="seconds"),
                "error": None,
                **self.named,
            }
            for cell in cells
        ]
        prepared = None
        try:
            prepared = self._prepare(pending)
        except Exception as error:
            if len(cells) == 1:
                yield {**facts[0], "error": _told(error)}
                return
        if prepared is None:  # outside the handler, whose error keeps tensors alive
            for cell in cells:
                yield from self.rows(replace(pending, cells=(cell,)))
            return
        for row, cell in zip(facts, cells, strict=True):
            try:
                yield {**row, **prepared.about, **self._measure(panel, task, prepared, cell)}
            except Exception as error:
                yield {**row, **prepared.about, "error": _told(error)}

    def check(self, pending: PendingSample) -> tuple[tuple[Rendered, ...], str]:
        """A sample's rendered questions and their hash.

        Raises `TaskError` if the hash is not that of earlier rows.
        """
        panel, task, index = pending.panel, pending.task, pending.index
        sample = task.sample(index, self.sources, self.tokenizer)
        longest, words = self.longest_prompt(panel, task), panel.answer_words
        rendered = render_questions(sample, self.tokenizer, longest, panel.truncate, words)
        digest = joint_digest(rendered)
        if pending.prompt_hash not in (None, digest):
            raise TaskError(
                f"Sample {index} of {task.name} differs from the one in earlier rows of this "
                f"folder: data or tokenizer have changed. Use a new folder."
            )
        return rendered, digest

    def _prepare(self, pending: PendingSample) -> _Prepared:
        panel, task = pending.panel, pending.task
        rendered, digest = self.check(pending)
        sample, compressed = rendered[0].sample, rendered[0].prompt
        if panel.protocol == "query_agnostic":
            start, end = compressed.spans.context_start, compressed.spans.context_end
            # One token after the context stays: the last token of a prompt is fed again and has no
            # entry, so the context is compressed to its very end.
            ids = compressed.ids[: end + 1]
            compressed = Prompt.from_ids(ids, (start, end), end, self.tokenizer)
            if sample.chat and has_chat_template(self.tokenizer):
                # A second pass opens an answer; it must not see this question's answer prefix.
                compressed = replace(compressed, tail=torch.tensor(turn_change(self.tokenizer)))
        needs = reduce(or_, (cell.pipeline.needs() for cell in pending.cells), Needs())
        prefill = capture(self.model, compressed, needs)
        full: list[AnswerOutputs] = []
        if panel.fidelity:
            kept = compress(self.model, compressed, prefill=prefill, ratio=1, pipeline="fullkv")
            for x in rendered:
                full.append(teacher_force(self.model, x.prompt.ids, x.answer_ids, kept.new_cache()))
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
        return _Prepared(rendered, full, about, compressed, prefill)

    def _measure(self, panel: Panel, task: Task, prepared: _Prepared, cell: Cell) -> dict[str, Any]:
        pipeline, budget, limit = cell.pipeline, cell.budget or Budget.ratio(1), None
        if task.name in LONG and cell.budget is not None:
            budget, limit = within(cell.budget, prepared.questions[0], pipeline)
        # Compressed once, however many questions there are.
        prompt, prefill = prepared.compressed, prepared.prefill
        result = compress(self.model, prompt, prefill=prefill, pipeline=pipeline, budget=budget)

        def ask(question: Rendered, full: AnswerOutputs | None) -> dict[str, Any]:
            """Fidelity and answer of one question over the compressed cache."""
            row: dict[str, Any] = {}
            ids, answer = question.prompt.ids, question.answer_ids
            if full is not None:
                forced = teacher_force(self.model, ids, answer, result.new_cache(limit))
                row["fidelity"] = compare(forced, full, answer)
                if limit is not None:
                    parts = (slice(x, x + limit.every) for x in range(0, len(answer), limit.every))
                    each = [compare(forced.part(x), full.part(x), answer[x]) for x in parts]
                    row["by_interval"] = each
            if panel.generate:
                sample, cache, cap = question.sample, result.new_cache(limit), _cap(panel, task)
                text, tokens, seconds = greedy(self.model, self.tokenizer, ids, cache, sample, cap)
                row |= {"prediction": text, "score": score(sample, text), "new_tokens": tokens}
                row["ms_per_token"] = 1000 * seconds / tokens
            return row

        each = list(map(ask, prepared.questions, prepared.full or repeat(None)))
        return cost_fields(result) | (each[0] if len(each) == 1 else over_questions(each))


def _cap(panel: Panel, task: Task) -> int:
    return min(task.max_new_tokens, panel.max_new_tokens or task.max_new_tokens)


# Settings of a panel that change what a row measures.
_SETTINGS = (
    "protocol", "generate", "max_new_tokens", "fidelity", "answer_words", "max_prompt", "truncate",
)  # fmt: skip


def identity(model: str, dtype: str, panel: Panel, task: Task, index: int) -> dict[str, Any]:
    """The fields that identify one sample under a panel's settings."""
    made = {"task": task.name, "length": task.length, "seed": task.seed, "index": index}
    settings = {name: getattr(panel, name) for name in _SETTINGS}
    return {"model": model, "dtype": dtype, **made, "settings": settings}


def sample_key(sample: Mapping[str, Any]) -> str:
    """A key for the sample of that `identity`, known without loading the model."""
    return hashlib.sha256(json.dumps(sample, sort_keys=True).encode()).hexdigest()[:24]


def cell_fields(sample: Mapping[str, Any], cell: Cell) -> dict[str, Any]:
    """The method and the budget of one cell of a sample, and its `key`.

    Rows with the same key measure the same thing.
    """
    fields = {"method": cell.method, "pipeline": cell.pipeline.to_dict(), "column": cell.column}
    return {"key": sample_key({**sample, **fields}), **fields}


def cost_fields(result: CompressionResult) -> dict[str, Any]:
    """Entries, bytes and seconds of one compression."""
    cost, timings = result.accounting, result.timings
    full = cost.entries.numel() * result.prompt.spans.context_length
    entries = {"budget": cost.budget, "spent": cost.spent, "full": full, "floor": cost.floor_spent}
    sizes = {"kv": cost.bytes, "metadata": cost.metadata_bytes, "backend": cost.backend_bytes}
    return {
        "entries": {**entries, "recent_per_head": cost.recent},
        "bytes": {**sizes, "full_kv": cost.full_bytes},
        "prefill_seconds": timings.prefill,
        "construction_seconds": timings.construction,
        "stage_seconds": dict(timings.as_dict()),
        "certified_ratio": cost.certified_ratio,
    }


def over_questions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the questions to one cache, and the values of each under "questions"."""

    def mean(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Mapping):
            return {name: mean([value[name] for value in values]) for name in values[0]}
        return sum(values) / len(values)

    averaged = {"fidelity", "score", "new_tokens", "ms_per_token"} & rows[0].keys()
    means = {name: mean([row[name] for row in rows]) for name in sorted(averaged)}
    return {**means, "questions": [dict(row) for row in rows]}


def _told(error: Exception) -> dict[str, str]:
    """An error as data, with the place in the code that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    told = {"type": type(error).__name__, "message": str(error)[:2000]}
    return {**told, "where": f"{last.name}:{last.lineno}"}


def versions() -> dict[str, str]:
    """Versions of the packages that can change a result."""
    own = {"gracekv": VERSION, "python": platform.python_version()}
    return own | {package: version(package) for package in ("torch", "transformers", "numpy")}
