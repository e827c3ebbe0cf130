"""`Worker`: runs one sample through all its cells, on one prefill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from gracekv import compress
from gracekv.errors import TaskError
from gracekv.evaluate.experiment import Cell, Panel, PendingSample
from gracekv.evaluate.fidelity import AnswerOutputs, compare, teacher_force
from gracekv.evaluate.generation import greedy
from gracekv.evaluate.metrics import score
from gracekv.evaluate.rendering import Rendered, render
from gracekv.evaluate.row_fields import cost_fields, error_fields, known_fields
from gracekv.evaluate.row_files import Row
from gracekv.evaluate.sample import Sample
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.tasks import Task
from gracekv.pipeline import Pipeline
from gracekv.prefill import Needs, Prefill
from gracekv.prefill.capture import capture
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.prompt import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """What all cells of one sample have in common.

    `compressed` is what was prefilled: the whole prompt, or the part before the question.
    """

    sample: Sample
    rendered: Rendered
    compressed: Prompt
    prefill: Prefill
    full: AnswerOutputs | None


class Worker:
    """A loaded model that turns samples into rows.

    Args:
        name: what the experiment calls the model.
        dtype: what the experiment calls its dtype.
        model: a transformers causal language model of a tested family, in evaluation mode.
        tokenizer: the model's.
        sources: where texts come from.
    """

    def __init__(self, name: str, dtype: str, model: Any, tokenizer: Any, sources: Sources) -> None:
        self.name, self.dtype = name, dtype
        self.model, self.tokenizer = model, tokenizer
        self.sources = sources
        self.marks = {k: v for k, v in fingerprint(model, tokenizer).items() if k != "model_name"}

    def longest_prompt(self, panel: Panel, task: Task) -> int:
        """Most prompt tokens of a sample: the panel's, or what the answer leaves of the model's."""
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
        known = [known_fields(self.name, self.dtype, panel, task, index, cell) for cell in cells]
        try:
            prepared = self._prepare(pending)
            about = self._about(prepared, task)
        except Exception as error:
            yield from ({**row, **error_fields(error)} for row in known)
            return
        for row, cell in zip(known, cells, strict=True):
            try:
                yield {**row, **about, **self._measure(panel, task, prepared, cell)}
            except Exception as error:
                yield {**row, **about, **error_fields(error)}

    def _prepare(self, pending: PendingSample) -> _Prepared:
        panel, task, index = pending.panel, pending.task, pending.index
        sample = task.sample(index, self.sources, self.tokenizer)
        longest = self.longest_prompt(panel, task)
        rendered = render(sample, self.tokenizer, longest, panel.truncate, panel.answer_words)
        if pending.prompt_hash not in (None, rendered.digest):
            raise TaskError(
                f"Sample {index} of {task.name} is not the one that earlier rows in this folder "
                f"are about: data or tokenizer have changed. Use a new folder."
            )
        compressed = rendered.prompt
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
        needs = reduce(or_, (cell.method.pipeline.needs() for cell in pending.cells), Needs())
        prefill = capture(self.model, compressed, needs)
        full = None
        if panel.fidelity:
            kept = compress(
                self.model, compressed, prefill=prefill, ratio=1, pipeline=Pipeline.named("fullkv")
            )
            full = teacher_force(
                self.model, rendered.prompt.ids, rendered.answer_ids, kept.new_cache()
            )
        return _Prepared(sample, rendered, compressed, prefill, full)

    def _about(self, prepared: _Prepared, task: Task) -> dict[str, Any]:
        spans = prepared.rendered.prompt.spans
        return {
            "prompt_hash": prepared.rendered.digest,
            "source": task.source(self.sources),
            "marks": self.marks,
            "prompt_tokens": spans.length,
            "context_tokens": spans.context_length,
            "removed_tokens": prepared.rendered.removed,
            "answers": list(prepared.sample.answers),
            "metric": prepared.sample.metric,
        }

    def _measure(self, panel: Panel, task: Task, prepared: _Prepared, cell: Cell) -> dict[str, Any]:
        pipeline, prompt = cell.method.pipeline, prepared.rendered.prompt
        result = compress(
            self.model,
            prepared.compressed,
            prefill=prepared.prefill,
            pipeline=pipeline,
            **cell.options(),
        )
        measured = cost_fields(result.accounting, result.timings, prompt.spans)
        if prepared.full is not None:
            answer = prepared.rendered.answer_ids
            forced = teacher_force(self.model, prompt.ids, answer, result.new_cache())
            measured["fidelity"] = compare(forced, prepared.full, answer)
        if panel.generate:
            cap = _cap(panel, task)
            answer_text = greedy(
                self.model, self.tokenizer, prompt.ids, result.new_cache(), prepared.sample, cap
            )
            scores = score(prepared.sample, answer_text.text)
            measured |= {
                "prediction": answer_text.text,
                "score": scores[prepared.sample.metric],
                "scores": scores,
                "new_tokens": answer_text.tokens,
                "ms_per_token": 1000 * answer_text.seconds / answer_text.tokens,
            }
        return measured


def _cap(panel: Panel, task: Task) -> int:
    caps = (task.max_new_tokens, panel.max_new_tokens)
    return min(cap for cap in caps if cap is not None)
