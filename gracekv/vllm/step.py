"""Which requests of the step that vLLM runs now have which context, in a worker process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gracekv.vllm.stored_context import StoredContext


class Asking(NamedTuple):
    """A request of a step that has a context.

    Attributes:
        context: its context.
        tokens: how many it computes in the step.
    """

    context: StoredContext
    tokens: int


class Step:
    """The contexts of one step, and the work that they are.

    Args:
        asking: requests that have a context, by the first block of their pages.
    """

    def __init__(self, asking: dict[int, Asking]) -> None:
        self.asking = asking
        self._planned: tuple[Any, Any] | None = None

    def plan(self, metadata: Any, make: Callable[[], Any]) -> Any:
        """The work over contexts; made in the first layer and the same in all of them.

        Args:
            metadata: vLLM's, of the step's attention.
            make: plans it.
        """
        if self._planned is None or self._planned[0] is not metadata:
            with torch.inference_mode():
                self._planned = metadata, make()
        return self._planned[1]


_current: Step | None = None


def begin(asking: dict[int, Asking]) -> None:
    """Let attention see these contexts; see `Step`."""
    global _current
    _current = Step(asking) if asking else None


def end() -> None:
    """The step is over."""
    begin({})


def current() -> Step | None:
    """The step that runs, or None if none of its requests has a context."""
    return _current
