"""Which requests of the step that vLLM runs now have which context, in a worker process."""

from __future__ import annotations

from typing import Any

import torch

from gracekv.vllm.batch import ContextBatch, plan_batch
from gracekv.vllm.store import StoredContext


class Step:
    """The contexts of one step, and the work that they are.

    Args:
        named: by the first block of each request's pages.
    """

    def __init__(self, named: dict[int, StoredContext]) -> None:
        self._named = named
        self._planned: tuple[Any, ContextBatch | None] | None = None

    def batch(self, metadata: Any, group: int) -> ContextBatch | None:
        """The work over contexts; made in the first layer and the same in all of them.

        Args:
            metadata: vLLM's, of the step's attention.
            group: query heads of a KV head.
        """
        if self._planned is None or self._planned[0] is not metadata:
            rows = len(metadata.query_start_loc) - 1
            with torch.inference_mode():
                batch = plan_batch(
                    self._named,
                    metadata.block_table[:rows, 0].tolist(),
                    metadata.query_start_loc.tolist(),
                    metadata.seq_lens.tolist(),
                    group,
                )
            self._planned = metadata, batch
        return self._planned[1]


_current: Step | None = None


def begin(named: dict[int, StoredContext]) -> None:
    """Let attention see these contexts; see `Step`."""
    global _current
    _current = Step(named) if named else None


def end() -> None:
    """The step is over."""
    begin({})


def current() -> Step | None:
    """The step that runs, or None if none of its requests has a context."""
    return _current
