"""Interrupts at chosen lines of gracekv, as Ctrl-C would come there."""

import sys
from collections import Counter
from pathlib import Path

import gracekv

PACKAGE = str(Path(gracekv.__file__).parent)


def _traced(action, seen):
    """Run `action`, calling `seen(file, line)` at each line of gracekv."""

    def at_line(frame, event, arg):
        if event == "line":
            seen((frame.f_code.co_filename, frame.f_lineno))
        return at_line

    def at_call(frame, event, arg):
        return at_line if frame.f_code.co_filename.startswith(PACKAGE) else None

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
    """Run `action` and interrupt it at that execution of a line; whether the interrupt came out."""
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
