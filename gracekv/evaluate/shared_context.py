"""One context and many questions: passages of SQuAD, and lookups of keys in several turns.

As in SCBench (Li et al. 2024, arXiv:2412.10319), a cache is compressed once, before any question is
known, and all questions are answered over it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

from gracekv.evaluate.ruler import numbered_documents
from gracekv.evaluate.sample import FurtherQuestion
from gracekv.evaluate.sources import Passage, Sources, ruler_forms
from gracekv.evaluate.texts import Family, Texts, distinct, random_stream

TASKS: dict[str, dict[str, Any]] = {
    "squad": {"group": "shared_qa", "metric": "set_any", "max_new_tokens": 32, "part": "squad"},
    "kv": {
        "group": "shared_lookup",
        "metric": "set_recall",
        "max_new_tokens": 16,
        "in_turns": True,
        "part": None,
    },
}
"""The fixed facts of each task; with `in_turns`, questions are turns of one conversation."""

_QUESTIONS = {"squad": 6, "kv": 5}
_LEAST = 5


def families(name: str, length: int, seed: int, index: int, sources: Sources) -> Iterator[Family]:
    """The families to try for sample `index` of a task, in order; for "squad" from one article.

    Args:
        name: one of `TASKS`.
        length: tokens of the longest prompt, including all turns, plus the generation cap.
        seed: seed of the whole dataset.
        index: number of the sample.
        sources: SQuAD's articles.
    """
    if name == "squad":
        rng = random_stream("shared_context:squad", length, seed, index)
        return _passages(sources.articles[index], rng)
    return iter([Family(_lookups, least=_LEAST)])


def _passages(article: Sequence[Passage], rng: Random) -> Iterator[Family]:
    """Runs of paragraphs from each start in an article's first half, the starts in random order.

    Sizes count paragraphs.
    """
    half = len(article) // 2 + 1
    for first in rng.sample(range(half), half):
        known = itertools.accumulate(len(passage.questions) for passage in article[first:])
        if enough := [size for size, count in enumerate(known, 1) if count >= _LEAST]:
            draw = partial(_questions, article[first:])
            yield Family(draw, least=enough[0], most=len(article) - first)


def _questions(article: Sequence[Passage], size: int, rng: Random) -> Texts:
    """The article's first `size` paragraphs, and questions about them."""
    task = ruler_forms()["tasks"]["qa_1"]
    shown = article[:size]
    questions = [question for passage in shown for question in passage.questions]
    chosen = rng.sample(questions, min(_QUESTIONS["squad"], len(questions)))
    form, prefix = task["question"], task["answer_prefix"]
    asked = tuple(FurtherQuestion(form.format(query=x), prefix, answers) for x, answers in chosen)
    return Texts(task["prefix"], numbered_documents([one.text for one in shown]), asked)


def _lookups(size: int, rng: Random) -> Texts:
    """A JSON object of `size` keys with numbers of 7 digits, and some keys to look up."""
    taken: set[str] = set()
    keys = distinct("words", size, rng, taken)
    values = dict(zip(keys, map(int, distinct("numbers", size, rng, taken)), strict=True))

    def lookup(key: str) -> FurtherQuestion:
        question = f'\nWhat is the value of the key "{key}" in the JSON object?'
        return FurtherQuestion(question, f' The value of the key "{key}" is', (str(values[key]),))

    told = (
        "The following JSON object holds keys and their values. I will ask you for some of the "
        "values afterwards.\n"
    )
    asked = tuple(map(lookup, rng.sample(keys, _QUESTIONS["kv"])))
    return Texts(told, json.dumps(values, indent=0), asked)
