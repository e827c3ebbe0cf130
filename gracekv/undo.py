"""What a block has changed is set back when it ends, also where Ctrl-C comes just then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` when the `with` block ends, however it ends.

    It is called twice and must stand that: Ctrl-C may come within the first call, or as it begins.
    """
    try:
        try:
            yield
        finally:
            undo()
    finally:
        undo()


@contextmanager
def hooked() -> Iterator[list[Any]]:
    """A list for hooks of modules, which are removed when the `with` block ends."""
    hooks: list[Any] = []
    with undone(lambda: [hook.remove() for hook in hooks]):
        yield hooks
