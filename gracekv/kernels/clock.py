"""`Clock`: seconds per name, measured without making a GPU wait."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)


class Clock(Generic[Name]):
    """Adds up the seconds of timed blocks by name.

    On a CPU a block takes wall seconds. On a GPU the time between two CUDA events on the current
    stream is used; it is only read when `seconds` is called, so timing a block costs two launches
    and no wait.
    """

    def __init__(self) -> None:
        self._seconds: dict[Name, float] = {}
        self._events: list[tuple[Name, torch.device, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time(self, name: Name, device: torch.device) -> Iterator[None]:
        """Add the seconds that the block takes on `device` to those of `name`."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(stream)
            yield
            last.record(stream)
            self._events.append((name, device, first, last))
        else:
            started = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - started)

    def seconds(self) -> dict[Name, float]:
        """The seconds of each name so far. Waits once for each GPU on which blocks were timed."""
        for device in {device for _, device, _, _ in self._events}:
            torch.cuda.synchronize(device)
        for name, _, first, last in self._events:
            self._add(name, first.elapsed_time(last) / 1000)
        self._events.clear()
        return dict(self._seconds)

    def _add(self, name: Name, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
