"""What a RULER family makes of a size and a random stream: the texts of one sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple


class Texts(NamedTuple):
    """The texts of one sample.

    Attributes:
        instruction: what stands before the long text.
        context: the long text.
        question: what stands after it.
        answer_prefix: the given start of the answer.
        answers: the references.
    """

    instruction: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One task, ready to be drawn at any size.

    Attributes:
        draw: texts of a size, from a random stream; the same stream gives the same texts.
        least: the smallest size that makes sense.
        most: the largest that the data allow, or None.
    """

    draw: Callable[[int, Random], Texts]
    least: int
    most: int | None = None
