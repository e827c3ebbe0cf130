"""Changes that last for a `with` block, and are undone however it ends, Ctrl-C included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

_Action = Callable[[], object]


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


class _ProcessSetting:
    """A setting of the whole process that blocks in several threads change at once.

    The first block changes it; the last one to end, in whichever thread, sets it back.

    Args:
        prepare: returns a function that makes the change and one that reverts it.
    """

    def __init__(self, prepare: Callable[[], tuple[_Action, _Action]]) -> None:
        self._prepare, self._lock = prepare, threading.RLock()
        self._blocks: set[object] = set()
        self._revert: _Action

    @contextmanager
    def changed(self) -> Iterator[None]:
        """The setting is changed inside the `with` block."""
        mine = object()

        def undo() -> None:
            if mine in self._blocks:
                with self._lock:
                    if self._blocks == {mine}:
                        self._revert()
                    self._blocks.discard(mine)
            # An interrupt that comes as a block gives the lock back may leave it with this thread.
            with suppress(RuntimeError):
                while True:
                    self._lock.release()

        with undone(undo):
            with self._lock:
                if not self._blocks:
                    change, self._revert = self._prepare()
                    self._blocks.add(mine)
                    change()
                self._blocks.add(mine)
            yield


def _highest_precision() -> tuple[_Action, _Action]:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The process sets precisions by backend, which this function refuses to sum up.
        backends: list[Any] = [torch.backends.cuda.matmul]
        backends.append(getattr(torch.backends.mkldnn, "matmul", backends[0]))
        set_before = [backend.fp32_precision for backend in backends]

        def use(precisions: Sequence[str]) -> None:
            for backend, precision in zip(backends, precisions, strict=True):
                backend.fp32_precision = precision

        return partial(use, ["ieee", "ieee"]), partial(use, set_before)
    use_all = torch.set_float32_matmul_precision
    return partial(use_all, "highest"), partial(use_all, before)


def _eager_stance() -> tuple[_Action, _Action]:
    # Made, it is in force already.
    with (stance := torch.compiler.set_stance("force_eager")):
        pass
    return stance.__enter__, partial(stance.__exit__, None, None, None)


_precision, _stance = _ProcessSetting(_highest_precision), _ProcessSetting(_eager_stance)


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, products of float32 numbers have float32's precision on every device.

    `torch.set_float32_matmul_precision("high")`, TF32 and autocast round factors, which would move
    selections. The matmul precision is a setting of the process: other threads compute at full
    precision meanwhile, too.
    """
    with _precision.changed(), without_autocast():
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, operations compute in the dtype of their inputs."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def uncompiled() -> AbstractContextManager[None]:
    """Inside, what `torch.compile` made runs uncompiled, in every thread.

    Dynamo would trace into the hooks and coroutines that read a model, and end the process.
    """
    return _stance.changed()
