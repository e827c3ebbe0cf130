"""One context and many questions: passages of SQuAD, and lookups of keys in several turns.

The manner of SCBench (Li et al. 2024, arXiv:2412.10319): a cache is compressed once, before any
question is known, and all questions are answered over it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

from gracekv.errors import TaskError
from gracekv.evaluate.sample import FurtherQuestion, Sample
from gracekv.evaluate.sources import Passage, Sources, ruler_forms
from gracekv.evaluate.texts import Family, Texts, distinct, largest, random_stream


class Kind(NamedTuple):
    """The fixed facts of a task.

    Attributes:
        group: the row of the tables.
        metric: how an answer is scored.
        max_new_tokens: most tokens of one answer.
        in_turns: whether the questions are turns of one conversation.
        part: of the sources, that its samples are made of, or None.
    """

    group: str
    metric: str
    max_new_tokens: int
    in_turns: bool
    part: str | None


TASKS = {
    "squad": Kind("shared_qa", "set_any", 32, in_turns=False, part="squad"),
    "kv": Kind("shared_lookup", "set_recall", 16, in_turns=True, part=None),
}
_QUESTIONS = {"squad": 6, "kv": 5}
_LEAST = 5


def generate(
    name: str,
    length: int,
    seed: int,
    index: int,
    sources: Sources,
    count: Callable[[Sample], int],
) -> Sample:
    """The longest sample whose longest prompt and its generated tokens together fit `length`.

    Args:
        name: one of `TASKS`.
        length: tokens of the rendered prompt, all turns included, plus the generation cap.
        seed: of the whole data set.
        index: number of the sample; for "squad" that of the article.
        sources: SQuAD's articles.
        count: tokens of a sample's longest rendered prompt.

    Raises `TaskError` if not even the smallest text fits, or the data run out.
    """
    kind, task = TASKS[name], f"shared_context:{name}"
    if name == "squad":
        families = _passages(_article(index, sources), random_stream(task, length, seed, index))
    else:
        families = iter([Family(_lookups, least=_LEAST)])

    def build(family: Family, size: int) -> Sample:
        texts = family.draw(size, random_stream(f"{task}|texts", length, seed, index))
        return texts.sample(task=task, index=index, metric=kind.metric, in_turns=kind.in_turns)

    room = length - kind.max_new_tokens

    def fits(family: Family, size: int) -> bool:
        return count(build(family, size)) <= room

    for family in families:
        size = largest(partial(fits, family), family.least, family.most)
        if size is not None:
            return build(family, size)
    raise TaskError(
        f"Sample {index} of {task} with {_LEAST} questions and answers of up to "
        f"{kind.max_new_tokens} tokens does not fit the length {length}. Use a larger length."
    )


def _article(index: int, sources: Sources) -> list[Passage]:
    if index >= len(sources.articles):
        raise TaskError(
            f"shared_context:squad has {len(sources.articles)} articles here, one a sample; sample "
            f"{index} does not exist. Use fewer samples or a larger question file."
        )
    return sources.articles[index]


def _passages(article: Sequence[Passage], rng: Random) -> Iterator[Family]:
    """Paragraphs of an article in a row from one of its first half on, in a random order of those.

    Sizes count paragraphs.
    """
    half = len(article) // 2 + 1
    for first in rng.sample(range(half), half):
        known = itertools.accumulate(len(passage.questions) for passage in article[first:])
        enough = [size for size, count in enumerate(known, 1) if count >= _LEAST]
        if enough:
            draw = partial(_questions, article[first:])
            yield Family(draw, least=enough[0], most=len(article) - first)


def _questions(article: Sequence[Passage], size: int, rng: Random) -> Texts:
    """The article's first `size` paragraphs, and questions about them."""
    form, task = ruler_forms()["document"], ruler_forms()["tasks"]["qa_1"]

    shown = article[:size]
    questions = [question for passage in shown for question in passage.questions]
    asked = rng.sample(questions, min(_QUESTIONS["squad"], len(questions)))
    return Texts(
        task["prefix"],
        "\n\n".join(form.format(i=i, document=one.text) for i, one in enumerate(shown, 1)),
        tuple(
            FurtherQuestion(task["question"].format(query=text), task["answer_prefix"], answers)
            for text, answers in asked
        ),
    )


def _lookups(size: int, rng: Random) -> Texts:
    """A JSON object of `size` keys with numbers of 7 digits, and some keys to look up."""
    taken: set[str] = set()
    keys = distinct("words", size, rng, taken)
    values = dict(zip(keys, map(int, distinct("numbers", size, rng, taken)), strict=True))
    return Texts(
        "The following JSON object holds keys and their values. I will ask you for some of the "
        "values afterwards.\n",
        json.dumps(values, indent=0),
        tuple(
            FurtherQuestion(
                f'\nWhat is the value of the key "{key}" in the JSON object?',
                f' The value of the key "{key}" is',
                (str(values[key]),),
            )
            for key in rng.sample(keys, _QUESTIONS["kv"])
        ),
    )
