"""RULER's 13 tasks, generated locally from their published procedure, for any tokenizer.

Families of hidden sentences are in `gracekv.evaluate.needles`; here are those of counting (cwe,
fwe) and of questions about documents (qa).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from gracekv.evaluate.needles import chains, needles
from gracekv.evaluate.sample import FurtherQuestion
from gracekv.evaluate.sources import Question, Sources, ruler_forms
from gracekv.evaluate.texts import Family, Texts, letters, words

TASKS = tuple(ruler_forms()["tasks"])

_ZETA_2 = math.pi**2 / 6


def family(name: str, length: int, index: int, sources: Sources) -> Family:
    """The texts of sample `index` of task `name`, at any size; `length` is in tokens."""
    task = ruler_forms()["tasks"][name]
    if task["family"] == "niah":
        return needles(task, sources.essay if task["part"] == "essay" else ())
    if task["family"] == "qa":
        questions, corpus = sources.questions(task["part"])
        return documents(task, questions[index], corpus)
    return _MADE[task["family"]](task, length)


def common_words(task: Mapping[str, Any], length: int) -> Family:
    """cwe: the most common words of a numbered list; sizes count distinct words.

    Ten words occur `often` times, all others `seldom`; a solved, smaller instance stands before
    the instruction and is never compressed (ours). Shorter lengths repeat less, as in RULER.
    """
    args = task["args"]
    common = args["num_cw"]
    often, seldom = (args["freq_cw"], args["freq_ucw"]) if length >= 4096 else (6, 1)
    shown, shown_often, shown_seldom = (40, 10, 3) if length >= 4096 else (20, 3, 1)
    vocabulary = words("adjectives", "nouns", "verbs")

    def instance(chosen: Sequence[str], often: int, seldom: int, rng: Random) -> Texts:
        text = list(chosen[:common]) * often + list(chosen[common:]) * seldom
        rng.shuffle(text)
        return _asked_once(task, _numbered(text), tuple(chosen[:common]))

    def draw(size: int, rng: Random) -> Texts:
        shuffled = rng.sample(vocabulary, len(vocabulary))
        # The demonstration's words come from the end, so that they do not depend on the size.
        example = instance(shuffled[-shown:], shown_often, shown_seldom, rng)
        solved = f"{example.solved()} {_numbered(example.asked[0].answers)}\n"
        real = instance(shuffled[:size], often, seldom, rng)
        return real._replace(instruction=solved + real.instruction)

    return Family(draw, least=common + 1, most=len(vocabulary) - shown)


def coded_words(task: Mapping[str, Any], length: int) -> Family:
    """fwe: sizes count the words of a Zipf text, of which rank 1 is printed as dots.

    The answers are ranks 2 to 4.
    """
    vocabulary = max(5, (length - task["max_new_tokens"]) // 50)

    def draw(size: int, rng: Random) -> Texts:
        ranked = letters(6, vocabulary, rng)
        ranked[0] = "..."
        counts = [math.floor(size * k**-2 / _ZETA_2) for k in range(1, vocabulary + 1)]
        text = list(Counter(dict(zip(ranked, counts, strict=True))).elements())
        rng.shuffle(text)
        return _asked_once(task, " ".join(text), tuple(ranked[1:4]))

    # From here on ranks 2 to 5 occur differently often.
    return Family(draw, least=80)


_MADE = {
    "variable_tracking": chains,
    "common_words_extraction": common_words,
    "freq_words_extraction": coded_words,
}


def documents(task: Mapping[str, Any], question: Question, corpus: Sequence[str]) -> Family:
    """qa_1 and qa_2: a question about one or two documents; sizes count characters of distractors.

    Distractors are taken in RULER's order (near ones, then random ones), leaving out those that no
    longer fit, so that whole documents fill the length (ours; RULER adds ten at a time).
    """
    most = sum(len(text) for text in {*question.near, *corpus} - set(question.gold))

    def draw(size: int, rng: Random) -> Texts:
        near = list(question.near)
        rng.shuffle(near)
        far = [text for text in corpus if text not in {*question.near, *question.gold}]
        rng.shuffle(far)
        chosen, room = list(question.gold), size
        for text in near + far:
            if len(text) <= room:
                chosen.append(text)
                room -= len(text)
        rng.shuffle(chosen)
        return _asked_once(task, numbered_documents(chosen), question.answers, query=question.text)

    return Family(draw, least=0, most=most)


def numbered_documents(texts: Sequence[str]) -> str:
    """RULER's form of several documents."""
    form = ruler_forms()["document"]
    return "\n\n".join(form.format(i=i, document=text) for i, text in enumerate(texts, 1))


def _asked_once(
    task: Mapping[str, Any], context: str, answers: tuple[str, ...], **fields: str
) -> Texts:
    """A task's own instruction and question around `context`; `fields` fill the question."""
    question = task["question"].format(**fields) if fields else task["question"]
    asked = FurtherQuestion(question, task["answer_prefix"], answers)
    return Texts(task["prefix"], context, (asked,))


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
