"""Task names, the paper's six groups as suites, and `Task`: where samples come from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gracekv.errors import TaskError
from gracekv.evaluate import long_outputs, ruler, shared_context
from gracekv.evaluate.rendering import chat_prompt, render_questions
from gracekv.evaluate.sample import Sample
from gracekv.evaluate.sources import Sources, longbench_forms, ruler_forms
from gracekv.registry import suggestion

# Tasks of several questions about one text; see `gracekv.evaluate.shared_context`.
SHARED = tuple(f"shared_context:{name}" for name in shared_context.TASKS)
# Answers that are long traces; see `gracekv.evaluate.long_outputs`.
LONG = tuple(f"long_output:{name}" for name in long_outputs.TASKS)

FORMS: dict[str, Mapping[str, Any]] = {
    **{f"ruler:{name}": form for name, form in ruler_forms()["tasks"].items()},
    **{f"longbench:{name}": form for name, form in longbench_forms().items()},
    **{f"shared_context:{name}": kind._asdict() for name, kind in shared_context.TASKS.items()},
    **{f"long_output:{name}": form for name, form in long_outputs.forms().items()},
}
"""The fixed facts of each task: among them `group` (the row of the tables), `max_new_tokens`, and
the `part` of the sources that it uses, or None; LongBench's parts have their tasks' names.
"""

SUITES: dict[str, tuple[str, ...]] = {
    # The paper's six groups. Its few-shot score is Rouge-L, which only samsum has.
    "single_doc_qa": ("longbench:narrativeqa", "longbench:qasper", "longbench:multifieldqa_en"),
    "multi_doc_qa": ("longbench:hotpotqa", "longbench:2wikimqa", "longbench:musique"),
    "summarization": ("longbench:gov_report", "longbench:qmsum", "longbench:multi_news"),
    "few_shot": ("longbench:samsum",),
    "aggregation": ("ruler:cwe", "ruler:fwe"),
    "retrieval": tuple(
        f"ruler:niah_multi{what}" for what in ("key_1", "key_2", "key_3", "value", "query")
    ),
    "ruler": tuple(f"ruler:{name}" for name in ruler.TASKS),
    "longbench": tuple(
        f"longbench:{name}"
        for name, form in longbench_forms().items()
        if form["language"] == "en" and form["group"] != "code"
    ),
}


def expand(names: Sequence[str]) -> list[str]:
    """Task names, suites replaced by their tasks, each once, in order.

    Raises `TaskError` for an unknown one.
    """
    found: dict[str, None] = {}
    for name in names:
        if name not in SUITES and name not in FORMS:
            raise TaskError(
                f"Unknown task {name!r}.{suggestion(name, [*SUITES, *FORMS])} Suites: "
                f"{', '.join(SUITES)}. Tasks: {', '.join(FORMS)}."
            )
        found |= dict.fromkeys(SUITES.get(name, (name,)))
    return list(found)


@dataclass(frozen=True, slots=True)
class Task:
    """One task at one length.

    Attributes:
        name: such as "ruler:cwe", "longbench:qasper" or "shared_context:kv".
        length: total tokens that a sample fills; None for LongBench, whose texts are given.
        seed: of the samples that are made here.
    """

    name: str
    length: int | None
    seed: int

    @property
    def group(self) -> str:
        """The row of the paper's tables that the task counts into."""
        return str(FORMS[self.name]["group"])

    @property
    def max_new_tokens(self) -> int:
        """The benchmark's cap on generated tokens."""
        return int(FORMS[self.name]["max_new_tokens"])

    @property
    def _part(self) -> str | None:
        part: str | None = FORMS[self.name].get("part", self.name)
        return part

    def source(self, sources: Sources) -> str:
        """The data behind the samples: file names and hashes, or "generated"."""
        return "generated" if self._part is None else sources.digest(self._part)

    def sample(self, index: int, sources: Sources, tokenizer: Any) -> Sample:
        """Sample `index`; raises `TaskError` if there is none."""
        benchmark, _, name = self.name.partition(":")
        if benchmark in GIVEN:
            return GIVEN[benchmark](name, index, sources)
        if self.length is None:
            raise TaskError(f"{self.name} needs a length in tokens, such as 4096.")
        made = (name, self.length, self.seed, index, sources)
        if benchmark == "shared_context":

            def longest(sample: Sample) -> int:
                found = render_questions(sample, tokenizer, sys.maxsize, "error", sys.maxsize)
                return max(len(rendered.prompt.ids) for rendered in found)

            return shared_context.generate(*made, longest)
        return ruler.generate(*made, lambda sample: len(chat_prompt(sample, tokenizer).ids))

    def available(self, samples: int, sources: Sources, first: int = 0) -> range:
        """Numbers of `samples` samples from `first` on, or of as many as the data hold."""
        end = first + samples
        return range(first, min(end, self._records(sources, end)))

    def _records(self, sources: Sources, made: int) -> int:
        """How many samples there are of given texts; `made` where they are made here."""
        if self.length is not None or self._part is None:
            return made
        return len(sources.records(self._part))

    def fitting(
        self, samples: int, sources: Sources, tokenizer: Any, limit: int, first: int = 0
    ) -> Iterator[int]:
        """`samples` numbers of given texts from `first` on, of at most `limit` prompt tokens.

        Of texts that are made here `samples` are tried, so there may be fewer.
        """
        every = range(first, self._records(sources, first + samples))

        def fits(index: int) -> bool:
            return len(chat_prompt(self.sample(index, sources, tokenizer), tokenizer).ids) <= limit

        return islice(filter(fits, every), samples)


def record_sample(name: str, index: int, sources: Sources) -> Sample:
    """Record `index` of LongBench v1's data set `name`, in file order, as LongBench asks it.

    The query, with the instruction that LongBench repeats after the text, is the question and is
    never compressed. Raises `TaskError` if there is no such record.
    """
    form, records = longbench_forms()[name], sources.records(f"longbench:{name}")
    if index >= len(records):
        raise TaskError(
            f"longbench:{name} has {len(records)} records here; sample {index} does not exist. "
            f"Ask for fewer samples."
        )
    record = records[index]
    classes = tuple(record.get("all_classes") or ())
    answers = [str(answer) for answer in record["answers"]]
    return Sample(
        task=f"longbench:{name}",
        index=index,
        instruction=form["prefix"],
        context=record["context"],
        # Not format(): queries hold braces.
        question=form["suffix"].replace("{input}", record["input"]),
        answer_prefix="",
        answers=tuple(answer for answer in answers if answer.strip()),
        metric=form["metric"],
        chat=form["chat_template"],
        first_line=form["first_line_only"],
        stop=form["extra_stop"],
        classes=classes,
    )


GIVEN = {"longbench": record_sample, "long_output": long_outputs.record_sample}
"""The function that makes a sample, for benchmarks whose texts and lengths are given."""
