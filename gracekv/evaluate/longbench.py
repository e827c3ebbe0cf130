"""LongBench v1: samples from its records and prompt strings."""

from __future__ import annotations

from gracekv.errors import TaskError
from gracekv.evaluate import templates
from gracekv.evaluate.sample import Sample
from gracekv.evaluate.sources import Sources

DATASETS = tuple(templates.longbench())


def record_sample(name: str, index: int, sources: Sources) -> Sample:
    """Record `index` of data set `name`, in file order, as LongBench asks it.

    The query, with the instruction that LongBench repeats after the text, is the question and is
    never compressed. Raises `TaskError` if there is no such record.
    """
    form, records = templates.longbench()[name], sources.longbench(name)
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
