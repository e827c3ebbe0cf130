"""Questions about documents, read from SQuAD's and HotpotQA's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Question:
    """One question of SQuAD or HotpotQA.

    Attributes:
        text: the question.
        answers: all annotators' answers.
        gold: documents that hold the answer; always shown.
        near: distractors that are shown before any other: the same article's, or the question's.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    near: tuple[str, ...]


class Passage(NamedTuple):
    """One paragraph of a SQuAD article.

    Attributes:
        text: the paragraph.
        questions: those that it answers, each with all annotators' answers.
    """

    text: str
    questions: tuple[tuple[str, tuple[str, ...]], ...]


def squad_articles(data: Mapping[str, Any]) -> list[list[Passage]]:
    """The articles of a SQuAD v2 file in file order, paragraph by paragraph."""
    return [
        [
            Passage(
                paragraph["context"],
                tuple(
                    (qa["question"].strip(), tuple(answer["text"] for answer in qa["answers"]))
                    for qa in paragraph["qas"]
                    if not qa.get("is_impossible")
                ),
            )
            for paragraph in article["paragraphs"]
        ]
        for article in data["data"]
    ]


def squad(data: Mapping[str, Any]) -> tuple[list[Question], list[str]]:
    """Answerable questions of a SQuAD v2 file in file order, and all its paragraphs."""
    questions, corpus = [], []
    for article in squad_articles(data):
        texts = [passage.text for passage in article]
        corpus += texts
        for passage in article:
            others = tuple(text for text in texts if text != passage.text)
            questions += [
                Question(text, answers, (passage.text,), others)
                for text, answers in passage.questions
            ]
    return questions, list(dict.fromkeys(corpus))


def hotpot(data: Sequence[Mapping[str, Any]]) -> tuple[list[Question], list[str]]:
    """Questions of a HotpotQA distractor file in file order, and all its documents.

    The documents with supporting facts are the gold ones; at short lengths the question's other
    documents are left out first (RULER shows all ten, which fit from about 2,000 tokens on).
    """
    questions: list[Question] = []
    corpus: list[str] = []
    for record in data:
        texts = {title: f"{title}\n{''.join(lines)}" for title, lines in record["context"]}
        corpus += texts.values()
        needed = dict.fromkeys(title for title, _ in record["supporting_facts"])
        gold = tuple(texts[title] for title in needed if title in texts)
        near = tuple(text for title, text in texts.items() if title not in needed)
        questions.append(Question(record["question"], (record["answer"],), gold, near))
    return questions, list(dict.fromkeys(corpus))
