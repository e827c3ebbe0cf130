"""The largest sample that fits a number of tokens."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], least: int, most: int | None = None) -> int | None:
    """The largest size in [least, most] with `fits`, by doubling and bisection; None if none fits.

    RULER searches in coarse steps and never below the first; steps of one fill the length and work
    at any (ours). A text of one more unit may be a token shorter, so `fits` need not be monotone:
    the result always fits, and is the largest around where bisection ends.
    """
    if not fits(least):
        return None
    good, step = least, 1
    while True:
        bad = good + step
        if most is not None and bad > most:
            bad = most + 1
            break
        if not fits(bad):
            break
        good, step = bad, 2 * step
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
