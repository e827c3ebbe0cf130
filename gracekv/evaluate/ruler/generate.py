"""`generate`: sample `index` of a RULER task at a length, for any tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random

from gracekv.errors import TaskError
from gracekv.evaluate import templates
from gracekv.evaluate.ruler.counting import coded_words, common_words
from gracekv.evaluate.ruler.documents import documents
from gracekv.evaluate.ruler.fitting import largest
from gracekv.evaluate.ruler.needles import needles
from gracekv.evaluate.ruler.texts import Family
from gracekv.evaluate.ruler.tracing import chains
from gracekv.evaluate.sample import Sample
from gracekv.evaluate.sources import Sources

TASKS = tuple(templates.ruler()["tasks"])

_METRICS = {"string_match_all": "set_recall", "string_match_part": "set_any"}


def generate(
    name: str,
    length: int,
    seed: int,
    index: int,
    sources: Sources,
    count: Callable[[Sample], int],
) -> Sample:
    """The longest sample whose prompt and generated tokens together fit `length`.

    Every sample has a random stream of its own, made of task, length, seed and index: the same
    arguments give the same text, and places in the text differ between samples (RULER shuffles all
    samples alike).

    Args:
        name: one of `TASKS`.
        length: tokens of the rendered prompt plus the task's generation cap.
        seed: of the whole data set.
        index: number of the sample.
        sources: essays and questions.
        count: tokens of a sample's rendered prompt.

    Raises `TaskError` if not even the smallest text fits, or the data run out.
    """
    task = templates.ruler()["tasks"][name]
    family = _family(name, length, index, sources)

    def build(size: int) -> Sample:
        texts = family.draw(size, random_stream(name, length, seed, index))
        return Sample(
            task=f"ruler:{name}",
            index=index,
            instruction=texts.instruction,
            context=texts.context,
            question=texts.question,
            answer_prefix=texts.answer_prefix,
            answers=texts.answers,
            metric=_METRICS[task["metric"]],
        )

    room = length - task["max_new_tokens"]
    size = largest(lambda size: count(build(size)) <= room, family.least, family.most)
    if size is None:
        raise TaskError(
            f"The smallest sample {index} of ruler:{name} has {count(build(family.least))} tokens "
            f"and generates up to {task['max_new_tokens']}, more than the length {length}. Use a "
            f"larger length."
        )
    if size == family.most:
        raise TaskError(
            f"There are not enough data for ruler:{name} at length {length}. Use a shorter length "
            f"(cwe ends at about 100,000 tokens), or a larger question file."
        )
    return build(size)


def random_stream(name: str, length: int, seed: int, index: int) -> Random:
    """The random numbers of one sample: the same arguments give the same ones."""
    text = f"{name}|{length}|{seed}|{index}"
    return Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]))


def _family(name: str, length: int, index: int, sources: Sources) -> Family:
    task = templates.ruler()["tasks"][name]
    if task["family"] == "niah":
        essay = task["args"]["type_haystack"] == "essay"
        return needles(task, sources.essay() if essay else ())
    if task["family"] == "variable_tracking":
        return chains(task, length)
    if task["family"] == "common_words_extraction":
        return common_words(task, length)
    if task["family"] == "freq_words_extraction":
        return coded_words(task, length)
    questions, corpus = sources.questions(task["args"]["dataset"])
    if index >= len(questions):
        raise TaskError(
            f"ruler:{name} has {len(questions)} questions; sample {index} does not exist. Use "
            f"fewer samples or a larger question file."
        )
    return documents(task, questions[index], corpus)
