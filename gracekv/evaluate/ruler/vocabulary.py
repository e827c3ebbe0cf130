"""Words, numbers and identifiers that RULER hides."""

from __future__ import annotations

import importlib.util
import string
import uuid
from functools import cache
from random import Random

from gracekv.errors import MissingDependencyError


@cache
def words(*categories: str) -> tuple[str, ...]:
    """Distinct words of wonderwords' categories ("nouns", "adjectives", "verbs"), sorted.

    Raises `MissingDependencyError` if wonderwords is not installed.
    """
    if importlib.util.find_spec("wonderwords") is None:
        raise MissingDependencyError(
            "RULER's words come from the package 'wonderwords'. Install it with: "
            "pip install 'gracekv[evaluate]'"
        )
    from wonderwords import RandomWord

    source = RandomWord()
    return tuple(
        sorted({w for category in categories for w in source.filter(include_categories=[category])})
    )


def draw(kind: str, rng: Random) -> str:
    """One "words" (adjective-noun), "numbers" (7 digits) or "uuids" (version 4)."""
    if kind == "words":
        return f"{rng.choice(words('adjectives'))}-{rng.choice(words('nouns'))}"
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(kind: str, count: int, rng: Random, taken: set[str]) -> list[str]:
    """`count` draws that differ from each other and from `taken`, to which they are added.

    RULER draws with replacement; a repeated key would make its question ambiguous.
    """
    found: list[str] = []
    while len(found) < count:
        one = draw(kind, rng)
        if one not in taken:
            taken.add(one)
            found.append(one)
    return found


def letters(
    length: int, count: int, rng: Random, alphabet: str = string.ascii_lowercase
) -> list[str]:
    """`count` distinct strings of `length` random letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(alphabet, k=length))] = None
    return list(found)
