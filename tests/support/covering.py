"""What runs every day: of a long list few cases in which all that varies is there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

# `make test-long` runs every case, more random examples, and what is marked `long`. A share such as
# 0.1 runs so much of the random cases that are counted.
LONG = float(os.environ.get("GRACEKV_LONG") or 0)


def cases(daily: int, long: int) -> int:
    """The number of random cases: `daily`, or the share of `long` that `GRACEKV_LONG` is."""
    return max(daily, round(long * LONG))


def every(step: int, cases: Sequence[Any]) -> list[Any]:
    """Every day each `step`-th of `cases`, in the long run all."""
    return list(cases if LONG else cases[::step])


def covering(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few of `cases`, in their order, that hold every value of every parameter at least once."""
    if LONG:
        return list(cases)
    values = [{(place, repr(value)) for place, value in enumerate(case)} for case in cases]
    missing, chosen = set().union(*values), []
    while missing:
        # The most new values; of equals the first.
        best = max(range(len(cases)), key=lambda i: (len(values[i] & missing), -i))
        chosen.append(best)
        missing -= values[best]
    return [cases[i] for i in sorted(chosen)]
