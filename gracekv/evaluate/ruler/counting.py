"""cwe and fwe: which words are most common, in a numbered list and in coded text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from gracekv.evaluate.ruler.texts import Family, Texts
from gracekv.evaluate.ruler.vocabulary import letters, words

_ZETA_2 = math.pi**2 / 6


def common_words(task: Mapping[str, Any], length: int) -> Family:
    """cwe; sizes count distinct words.

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
        listed = " ".join(f"{i}. {word}" for i, word in enumerate(text, 1))
        return Texts(
            task["prefix"], listed, task["question"], task["answer_prefix"], tuple(chosen[:common])
        )

    def draw(size: int, rng: Random) -> Texts:
        shuffled = rng.sample(vocabulary, len(vocabulary))
        # The demonstration's words come from the end, so that they do not depend on the size.
        example = instance(shuffled[-shown:], shown_often, shown_seldom, rng)
        answers = " ".join(f"{i}. {word}" for i, word in enumerate(example.answers, 1))
        solved = f"{''.join(example[:4])} {answers}\n"
        real = instance(shuffled[:size], often, seldom, rng)
        return real._replace(instruction=solved + real.instruction)

    return Family(draw, least=common + 1, most=len(vocabulary) - shown)


def coded_words(task: Mapping[str, Any], length: int) -> Family:
    """fwe; sizes count the words of a Zipf text, of which rank 1 is printed as dots.

    The answers are ranks 2 to 4.
    """
    vocabulary = max(5, (length - task["max_new_tokens"]) // 50)

    def draw(size: int, rng: Random) -> Texts:
        ranked = letters(6, vocabulary, rng)
        ranked[0] = "..."
        counts = [math.floor(size * k**-2 / _ZETA_2) for k in range(1, vocabulary + 1)]
        text = list(Counter(dict(zip(ranked, counts, strict=True))).elements())
        rng.shuffle(text)
        return Texts(
            task["prefix"],
            " ".join(text),
            task["question"],
            task["answer_prefix"],
            tuple(ranked[1:4]),
        )

    # From here on ranks 2 to 5 occur differently often.
    return Family(draw, least=80)
