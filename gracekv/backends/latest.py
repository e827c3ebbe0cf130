"""The result of the latest of several requests, shared by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(Generic[K, V]):
    """Keeps one value: that of the key asked for last.

    Safe for threads: a value is built completely under a lock and then published by one
    assignment, so that readers see the old value or the new one, never a part of it.
    """

    __slots__ = ("_entry", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entry: tuple[K, V] | None = None

    def get(self, key: K, build: Callable[[], V]) -> V:
        """The value of `key`; made by `build` unless `key` is the latest."""
        entry = self._entry
        if entry is None or entry[0] != key:
            with self._lock:
                entry = self._entry
                if entry is None or entry[0] != key:
                    entry = self._entry = (key, build())
        return entry[1]

    @property
    def value(self) -> V | None:
        """The latest value, None before there is one."""
        return None if self._entry is None else self._entry[1]
