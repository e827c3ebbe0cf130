"""How long the stages of a pipeline take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class StageClock:
    """Wall seconds by stage; waits for the GPU, so that a stage pays for its own work."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._wait: Callable[[], None] = (
            (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
        )

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time the block as `seconds[stage]`, or add to what the stage took before."""
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
