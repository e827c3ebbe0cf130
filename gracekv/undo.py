"""What is changed for a block alone is set back when it ends, also where Ctrl-C comes just then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


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


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, float32 products have float32's precision on every device.

    `torch.set_float32_matmul_precision("high")` and TF32 round factors to 10 bits, which would move
    selections. What was set is set again afterwards. It is a setting of the process: other threads
    compute at full precision meanwhile, too.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The process sets precisions by backend, which this function refuses to sum up.
        backends: list[Any] = [torch.backends.cuda.matmul]
        backends.append(getattr(torch.backends.mkldnn, "matmul", backends[0]))
        set_before = [backend.fp32_precision for backend in backends]

        def undo() -> None:
            for backend, precision in zip(backends, set_before, strict=True):
                backend.fp32_precision = precision

        with undone(undo):
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        return
    with undone(lambda: torch.set_float32_matmul_precision(before)):
        torch.set_float32_matmul_precision("highest")
        yield
