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

    It is called twice, so it must be idempotent: Ctrl-C may interrupt the first call.
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
    """Yield a list for module hooks, which are removed when the `with` block ends."""
    hooks: list[Any] = []
    with undone(lambda: [hook.remove() for hook in hooks]):
        yield hooks


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace `module.forward` inside the `with` block, unless it is replaced again meanwhile."""
    before = vars(module).get("forward")

    def undo() -> None:
        if vars(module).get("forward") is forward:
            if before is None:
                del module.forward
            else:
                module.forward = before

    with undone(undo):
        module.forward = forward
        yield


class _ProcessSetting:
    """A process-wide setting that `with` blocks in several threads may change at once.

    The first block changes it; the last one to end, in whichever thread, restores it.

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
            # An interrupt while the lock is being released may leave this thread holding it.
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
        # torch raises if the process sets precisions per backend.
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
    # It takes effect when it is made; leaving the block reverts that.
    with (stance := torch.compiler.set_stance("force_eager")):
        pass
    return stance.__enter__, partial(stance.__exit__, None, None, None)


_precision, _stance = _ProcessSetting(_highest_precision), _ProcessSetting(_eager_stance)


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside the block, float32 products are computed in full float32 on every device.

    `torch.set_float32_matmul_precision("high")`, TF32 and autocast round factors, which would
    change selections. The matmul precision is process-wide, so other threads also compute in full
    precision meanwhile.
    """
    with _precision.changed(), without_autocast():
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside the block, autocast is off: operations compute in the dtype of their inputs."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda", "xpu"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def uncompiled() -> AbstractContextManager[None]:
    """Inside the block, compiled functions run uncompiled, in every thread.

    Dynamo would trace into the hooks and coroutines that read a model, and crash the process.
    """
    return _stance.changed()
