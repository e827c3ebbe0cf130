"""Interrupts at chosen lines of gracekv, as by Ctrl-C."""

import sys
from collections import Counter
from linecache import getline
from pathlib import Path

import gracekv

PACKAGE = str(Path(gracekv.__file__).parent)


def _traced(action, seen):
    """Run `action`, calling `seen(file, line)` at each line of gracekv.

    Except where a `with` ends: it returns to its line before it releases what it holds, such as a
    lock, and no signal is handled in between.
    """

    def at_call(frame, event, arg):
        file, before = frame.f_code.co_filename, 0

        def at_line(frame, event, arg):
            nonlocal before
            back, before = before > frame.f_lineno, frame.f_lineno
            ends = back and getline(file, before).lstrip().startswith("with ")
            if event == "line" and not ends:
                seen((file, before))
            return at_line

        return at_line if file.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        action()
    finally:
        sys.settrace(before)


def executed_lines(action):
    """How often `action` executes each line of gracekv: {(file, line): count}."""
    counts = Counter()
    _traced(action, lambda place: counts.update([place]))
    return counts


def interrupted(action, place, occurrence):
    """Interrupt `action` at that execution of a line; returns whether the interrupt propagated."""
    left = occurrence

    def seen(here):
        nonlocal left
        if here == place:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    try:
        _traced(action, seen)
    except KeyboardInterrupt:
        return True
    return False
