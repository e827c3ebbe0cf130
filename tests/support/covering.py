"""Which cases of a long list run every day: few in which all that varies is there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

# `make test-every` runs every case.
ALL = os.environ.get("GRACEKV_FUZZ") == "full"


def covering(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few of `cases`, in their order, that hold every value of every parameter at least once."""
    if ALL:
        return list(cases)
    values = [{(place, repr(value)) for place, value in enumerate(case)} for case in cases]
    missing, chosen = set().union(*values), []
    while missing:
        # The most new values; of equals the first.
        best = max(range(len(cases)), key=lambda i: (len(values[i] & missing), -i))
        chosen.append(best)
        missing -= values[best]
    return [cases[i] for i in sorted(chosen)]
