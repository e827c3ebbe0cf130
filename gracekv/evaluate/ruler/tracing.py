"""vt: a chain of variables, each assigned the one before, among noise."""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping
from random import Random
from typing import Any

from gracekv.evaluate import templates
from gracekv.evaluate.ruler.needles import noise_lines
from gracekv.evaluate.ruler.texts import Family, Texts
from gracekv.evaluate.ruler.vocabulary import letters

# What RULER's search finds for its demonstration of at most 500 tokens: one step of lines.
_DEMONSTRATION = {"long": 10, "short": 5}


def chains(task: Mapping[str, Any], length: int) -> Family:
    """The variable tracing task; sizes count sentences of noise.

    The demonstration, a solved instance with shorter names, stands before the instruction and is
    never compressed (ours; RULER knows no compression).
    """
    lines = _DEMONSTRATION["long" if length >= 4096 else "short"]
    names = task["args"]["num_hops"] + 1

    def instance(sentences: int, letters_per_name: int, rng: Random) -> Texts:
        found = letters(letters_per_name, names, rng, string.ascii_uppercase)
        value = str(rng.randint(10_000, 99_998))
        form = templates.ruler()
        chain = [form["vt_first"].format(x=found[0], value=value)]
        chain += [
            form["vt_next"].format(y=new, x=old).rstrip() for old, new in itertools.pairwise(found)
        ]
        text = noise_lines(sentences)
        places = sorted(rng.choices(range(len(text) + 1), k=names))
        for place, line in reversed(list(zip(places, chain, strict=True))):
            text.insert(place, line)
        fields = {"query": value, "num_v": names}
        return Texts(
            task["prefix"],
            "\n".join(text),
            task["question"].format(**fields),
            task["answer_prefix"].format(**fields),
            tuple(found),
        )

    def draw(size: int, rng: Random) -> Texts:
        # Its own stream: the demonstration must not change with the size of the real instance.
        shown = instance(5 * lines, 3, Random(rng.getrandbits(64)))
        solved = "".join(shown[:4]) + " ".join(shown.answers)
        real = instance(size, 5, rng)
        return real._replace(instruction=f"{solved}\n\n{real.instruction}")

    return Family(draw, least=1)
