"""qa_1 and qa_2: a question about one or two documents among many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from gracekv.evaluate import templates
from gracekv.evaluate.questions import Question
from gracekv.evaluate.ruler.texts import Family, Texts


def documents(task: Mapping[str, Any], question: Question, corpus: Sequence[str]) -> Family:
    """A question-answering task; sizes count characters of distractors.

    Distractors are taken in RULER's order (near ones, then random ones), leaving out those that no
    longer fit, so that whole documents fill the length (ours; RULER adds ten at a time).
    """
    form = templates.ruler()["document"]
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
        context = "\n\n".join(form.format(i=i, document=text) for i, text in enumerate(chosen, 1))
        return Texts(
            task["prefix"],
            context,
            task["question"].format(query=question.text),
            task["answer_prefix"],
            question.answers,
        )

    return Family(draw, least=0, most=most)
