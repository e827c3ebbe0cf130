"""A text with hidden numbers, a question for each, and the fidelity of compressed answers."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import machine
from torch import Tensor

from gracekv import CompressionResult, Prompt
from gracekv.evaluate.answers import AnswerOutputs, compare, teacher_force
from gracekv.hf.generation import continue_ids

WORDS = (
    "teapot", "lantern", "violin", "harbour", "walnut", "compass", "orchard", "blanket", "saddle",
    "chimney",
)  # fmt: skip
NEW_TOKENS = 24
# A divergence below this is rounding; as in gracekv.evaluate.
_LEAST_KL = 1e-4


def story(tokenizer: Any, tokens: int, seed: int = 0) -> tuple[str, list[tuple[str, str]]]:
    """About `tokens` tokens of the demo's chapter with ten numbers in it; questions and answers."""
    chapter = files("gracekv.data").joinpath("alice_chapter_1.txt").read_text(encoding="utf-8")
    rng = random.Random(seed)
    facts = [(word, str(rng.randrange(100_000, 1_000_000))) for word in WORDS]
    sentences = [f"The special magic number for the {word} is {number}." for word, number in facts]
    taken = sum(len(tokenizer(sentence)["input_ids"]) for sentence in sentences)
    ids = tokenizer(chapter)["input_ids"]
    text = tokenizer.decode((ids * (tokens // len(ids) + 1))[: tokens - taken])
    gaps = [i + 1 for i, letter in enumerate(text) if letter == " " and text[i - 1] in ".,;:!?”"]
    parts, begin = [], 0
    for number, sentence in enumerate(sentences):
        # In the middle of each tenth.
        goal = (2 * number + 1) * len(text) / (2 * len(sentences))
        gap = min(gaps, key=lambda place: abs(place - goal))
        parts += [text[begin:gap], sentence + " "]
        begin = gap
    questions = [
        (f"What is the special magic number for the {word}?", number) for word, number in facts
    ]
    return "".join([*parts, text[begin:]]), questions


@dataclass(frozen=True)
class Reference:
    """FullKV's answer to a question.

    Attributes:
        question: its text.
        expected: the hidden number.
        ids: int64 [T] of context and question.
        answer: int64 [A], FullKV's own tokens.
        outputs: model outputs that predict them over the full cache.
    """

    question: str
    expected: str
    ids: Tensor
    answer: Tensor
    outputs: AnswerOutputs


def references(
    full: CompressionResult, context: str, questions: list[tuple[str, str]]
) -> list[Reference]:
    """FullKV's answers over the cache of `full`, which holds everything."""
    found = []
    for question, expected in questions:
        prompt = Prompt.from_chat(full.tokenizer, context=context, question=question)
        answer = tokens_of(full, prompt.ids)
        outputs = teacher_force(full.model, prompt.ids, answer, full.new_cache())
        found.append(Reference(question, expected, prompt.ids, answer, outputs))
    return found


def tokens_of(result: CompressionResult, ids: Tensor, count: int = NEW_TOKENS) -> Tensor:
    """int64 [count]: greedy tokens after `ids` [T], which begin with the result's context."""
    rows = continue_ids(
        result.model, [ids], result.new_cache(), result.tokenizer, count, {"min_new_tokens": count}
    )
    return rows[0]


def fidelity(result: CompressionResult, asked: Reference) -> tuple[float, bool]:
    """log KL to FullKV over its own tokens, and whether the number is in the result's answer."""
    outputs = teacher_force(result.model, asked.ids, asked.answer, result.new_cache())
    kl = compare(outputs, asked.outputs, asked.answer)["kl"]
    said = result.tokenizer.decode(tokens_of(result, asked.ids))
    return math.log(max(kl, _LEAST_KL)), asked.expected in said


def facts() -> list[str]:
    """Header lines of a page: machine and commit."""
    return [
        f"- machine: {machine.cpu()}, {machine.threads()}; {machine.versions()}",
        f"- commit: {machine.commit()}",
        f"- command: `python {' '.join(sys.argv)}`",
        "- model: SmolLM2-135M-Instruct, float32",
    ]
