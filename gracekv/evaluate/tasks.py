"""Task names, the paper's six groups as suites, and `Task`, which makes samples."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gracekv.errors import TaskError, suggestion
from gracekv.evaluate import long_outputs, ruler, shared_context
from gracekv.evaluate.sample import Sample, chat_prompt, render_questions
from gracekv.evaluate.sources import Sources, longbench_forms, ruler_forms
from gracekv.evaluate.texts import Family, largest, random_stream

# Tasks of several questions about one text; see `gracekv.evaluate.shared_context`.
SHARED = tuple(f"shared_context:{name}" for name in shared_context.TASKS)
# Answers that are long traces; see `gracekv.evaluate.long_outputs`.
LONG = tuple(f"long_output:{name}" for name in long_outputs.TASKS)

FORMS: dict[str, Mapping[str, Any]] = {
    **{f"ruler:{name}": form for name, form in ruler_forms()["tasks"].items()},
    **{f"longbench:{name}": form for name, form in longbench_forms().items()},
    **{f"shared_context:{name}": form for name, form in shared_context.TASKS.items()},
    **{f"long_output:{name}": form for name, form in long_outputs.FORMS.items()},
}
"""The fixed facts of each task, including `group` (the row of the tables), `max_new_tokens`, and
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
    "longbench": tuple(f"longbench:{name}" for name in longbench_forms()),
}


def expand(names: Sequence[str]) -> list[str]:
    """Task names in order, each once, with suites replaced by their tasks.

    Raises `TaskError` for an unknown name.
    """
    unique: dict[str, None] = {}
    for name in names:
        if name not in SUITES and name not in FORMS:
            raise TaskError(
                f"Unknown task {name!r}.{suggestion(name, [*SUITES, *FORMS])} Suites: "
                f"{', '.join(SUITES)}. Tasks: {', '.join(FORMS)}."
            )
        unique |= dict.fromkeys(SUITES.get(name, (name,)))
    return list(unique)


@dataclass(frozen=True, slots=True)
class Task:
    """One task at one length.

    Attributes:
        name: the task's name, such as "ruler:cwe", "longbench:qasper" or "shared_context:kv".
        length: total tokens that a sample fills; None for LongBench, whose texts are given.
        seed: seed of the generated samples.
    """

    name: str
    length: int | None
    seed: int

    @property
    def group(self) -> str:
        """The row of the paper's tables to which the task belongs."""
        return str(FORMS[self.name]["group"])

    @property
    def max_new_tokens(self) -> int:
        """The benchmark's cap on generated tokens."""
        return int(FORMS[self.name]["max_new_tokens"])

    @property
    def _part(self) -> Any:
        return FORMS[self.name].get("part", self.name)

    def source(self, sources: Sources) -> str:
        """The data behind the samples: file names and hashes, or "generated"."""
        return "generated" if self._part is None else sources.digest(self._part)

    def sample(self, index: int, sources: Sources, tokenizer: Any) -> Sample:
        """Sample `index`: a given one, or the longest whose prompt and answer fit `length`.

        Each generated sample has its own random stream, so that the same arguments give the same
        text, and places in the text differ between samples (RULER shuffles all the same way).

        Raises `TaskError` if there is no such sample, or if the smallest one does not fit.
        """
        benchmark, _, name = self.name.partition(":")
        count = self._sample_count(sources)
        if count is not None and index >= count:
            raise TaskError(
                f"{self.name} has {count} samples here; sample {index} does not exist. Ask for "
                f"fewer samples, or give a larger file."
            )
        if benchmark in GIVEN:
            return GIVEN[benchmark](name, index, sources)
        if (length := self.length) is None:
            raise TaskError(f"{self.name} needs a length in tokens, such as 4096.")
        form, room = FORMS[self.name], length - self.max_new_tokens
        if shared := benchmark == "shared_context":
            families = shared_context.families(name, length, self.seed, index, sources)
            stream = f"{self.name}|texts"
        else:
            families, stream = iter([ruler.family(name, length, index, sources)]), name

        def build(family: Family, size: int) -> Sample:
            texts = family.draw(size, random_stream(stream, length, self.seed, index))
            facts = {"metric": form["metric"], "in_turns": form.get("in_turns", False)}
            return texts.sample(task=self.name, index=index, **facts)

        def fits(family: Family, size: int) -> bool:
            return _tokens(build(family, size), tokenizer) <= room

        for family in families:
            size = largest(partial(fits, family), family.least, family.most)
            if size is not None and size == family.most and not shared:
                raise TaskError(
                    f"There is not enough data for {self.name} at length {length}. Use a "
                    f"shorter length (cwe ends at about 100,000 tokens), or a larger file."
                )
            if size is not None:
                return build(family, size)
        raise TaskError(
            f"The smallest sample {index} of {self.name}, with an answer of up to "
            f"{self.max_new_tokens} tokens, does not fit the length {length}: use a larger one."
        )

    def available(self, samples: int, sources: Sources, first: int = 0) -> range:
        """Numbers of `samples` samples from `first` on, or of as many as there are.

        Raises `TaskError` if there are none.
        """
        end, count = first + samples, self._sample_count(sources)
        if count is not None and first >= count:
            raise TaskError(f"{self.name} has {count:,} samples: none from number {first:,} on.")
        return range(first, end if count is None else min(end, count))

    def _sample_count(self, sources: Sources) -> int | None:
        """The number of samples in the data, or None if any number can be generated."""
        part = self._part
        if part is None or part == "essay":
            return None
        if self.name == "shared_context:squad":
            return len(sources.articles)
        if part in ("squad", "hotpotqa"):
            return len(sources.questions(part)[0])
        return len(sources.records(part))


def record_sample(name: str, index: int, sources: Sources) -> Sample:
    """Record `index` of LongBench v1's dataset `name`, in file order, in LongBench's format.

    The question, which is never compressed, is the query with the instruction that LongBench
    repeats after the text.
    """
    form, record = longbench_forms()[name], sources.records(f"longbench:{name}")[index]
    return Sample(
        task=f"longbench:{name}",
        index=index,
        instruction=form["prefix"],
        context=record["context"],
        # Not format(): queries hold braces.
        question=form["suffix"].replace("{input}", record["input"]),
        answers=tuple(text for answer in record["answers"] if (text := str(answer)).strip()),
        answer_prefix="",
        metric=form["metric"],
        chat=form["chat_template"],
        first_line=form["first_line_only"],
        stop=form["extra_stop"],
        classes=tuple(record.get("all_classes") or ()),
    )


def _tokens(sample: Sample, tokenizer: Any) -> int:
    """Tokens of the sample's longest prompt."""
    if not sample.further:
        return len(chat_prompt(sample, tokenizer).ids)
    rendered = render_questions(sample, tokenizer, sys.maxsize, "error", sys.maxsize)
    return max(len(one.prompt.ids) for one in rendered)


GIVEN = {"longbench": record_sample, "long_output": long_outputs.record_sample}
"""The function that makes a sample, for benchmarks whose texts and lengths are given."""
