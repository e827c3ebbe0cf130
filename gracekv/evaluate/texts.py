"""Generated texts of any size, for RULER and for tasks of several questions.

A family draws texts of a size from a random stream; `largest` finds the size that fits.
"""

from __future__ import annotations

import hashlib
import string
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, NamedTuple

from gracekv.errors import required
from gracekv.evaluate.sample import FurtherQuestion, Sample


class Texts(NamedTuple):
    """The texts of one sample.

    Attributes:
        instruction: the text before the context.
        context: the long text.
        asked: the questions about it, at least one.
    """

    instruction: str
    context: str
    asked: tuple[FurtherQuestion, ...]

    def solved(self) -> str:
        """Everything up to the first question's given start of an answer."""
        return "".join((self.instruction, self.context, *self.asked[0][:2]))

    def sample(self, **about: Any) -> Sample:
        """The sample of these texts; `about` are the task's fields."""
        first, *further = self.asked
        texts: dict[str, Any] = {"instruction": self.instruction, "context": self.context}
        return Sample(**texts, **first._asdict(), further=tuple(further), **about)


@dataclass(frozen=True, slots=True)
class Family:
    """One task, ready to be drawn at any size.

    Attributes:
        draw: texts of a size, from a random stream; the same stream gives the same texts.
        least: the smallest sensible size.
        most: the largest size that the data allow, or None.
    """

    draw: Callable[[int, Random], Texts]
    least: int
    most: int | None = None


def random_stream(name: str, length: int, seed: int, index: int) -> Random:
    """The random stream of one sample; the same arguments give the same numbers."""
    text = f"{name}|{length}|{seed}|{index}"
    return Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]))


def largest(fits: Callable[[int], bool], least: int, most: int | None = None) -> int | None:
    """The largest size in [least, most] with `fits`, by doubling and bisection; None if none fits.

    RULER searches in coarse steps and never below the first; steps of one fill any length (ours). A
    text of one more unit may be a token shorter, so `fits` need not be monotone: the result always
    fits, and is the largest near the end of the bisection.
    """
    if not fits(least):
        return None
    limit = sys.maxsize if most is None else most
    good, step = least, 1
    while good + step <= limit and fits(good + step):
        good, step = good + step, 2 * step
    bad = min(good + step, limit + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


@cache
def words(*categories: str) -> tuple[str, ...]:
    """Distinct words of wonderwords' categories ("nouns", "adjectives", "verbs"), sorted.

    Raises `MissingDependencyError` if wonderwords is not installed.
    """
    source = required("wonderwords", "evaluate").RandomWord()
    found = (source.filter(include_categories=[category]) for category in categories)
    return tuple(sorted(set[str]().union(*found)))


def distinct(kind: str, count: int, rng: Random, taken: set[str]) -> list[str]:
    """`count` draws, distinct from each other and from `taken`, to which they are added.

    Kinds are "words" (adjective-noun), "numbers" (7 digits) and "uuids" (version 4). RULER draws
    with replacement, but a repeated key would make its question ambiguous.
    """

    def draw() -> str:
        if kind == "words":
            return f"{rng.choice(words('adjectives'))}-{rng.choice(words('nouns'))}"
        if kind == "numbers":
            return str(rng.randint(1_000_000, 9_999_999))
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    return _drawn(draw, count, taken)


def letters(
    length: int, count: int, rng: Random, alphabet: str = string.ascii_lowercase
) -> list[str]:
    """`count` distinct strings of `length` random letters."""
    return _drawn(lambda: "".join(rng.choices(alphabet, k=length)), count, set())


def _drawn(draw: Callable[[], str], count: int, used: set[str]) -> list[str]:
    """`count` distinct draws that are not in `used`, to which they are added."""
    drawn: list[str] = []
    while len(drawn) < count:
        if (text := draw()) not in used:
            drawn.append(text)
            used.add(text)
    return drawn
