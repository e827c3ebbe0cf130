"""The daily selection from a long list of cases: few, but every parameter value occurs."""

import os
from collections.abc import Sequence
from typing import Any

# `make test-long` runs every case, more random examples, and tests marked `long`. A fraction such
# as 0.1 runs this share of the random cases that `cases` counts.
LONG = float(os.environ.get("GRACEKV_LONG") or 0)


def cases(daily: int, long: int) -> int:
    """The number of random cases: `daily`, or `long` times `GRACEKV_LONG`."""
    return max(daily, round(long * LONG))


def every(step: int, cases: Sequence[Any]) -> list[Any]:
    """Daily every `step`-th of `cases`; all in the long run."""
    return list(cases if LONG else cases[::step])


def covering(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few of `cases`, in their order, that hold every value of every parameter at least once."""
    if LONG:
        return list(cases)
    values = [{(place, repr(value)) for place, value in enumerate(case)} for case in cases]
    missing, chosen = set().union(*values), []
    while missing:
        # The case with most new values, the first of equals.
        best = max(range(len(cases)), key=lambda i: (len(values[i] & missing), -i))
        chosen.append(best)
        missing -= values[best]
    return [cases[i] for i in sorted(chosen)]
