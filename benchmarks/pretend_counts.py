"""`Ledger`: launches and waits by stage and line of gracekv, and modelled seconds.

The tables follow the CUDA sources of torch 2.11; launch counts are rounded.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

LAUNCH_SECONDS, SYNC_SECONDS, BYTES_A_SECOND = 6e-6, 10e-6, 3.3e12
FLOPS_A_SECOND = {
    "product": 500e12, "flash": 400e12, "efficient": 300e12, "float32": 50e12, "triton": 150e12,
    "float64": 2e12,
}  # fmt: skip
"""Of an H100, by kind of kernel; float64 is that of batched factorisations."""

LAUNCHES = {
    "sort": 5, "topk": 4, "nonzero": 3, "masked_select": 4, "cumsum": 2, "isin": 25, "_unique2": 9,
    "unique_dim": 12, "unique_consecutive": 5, "bincount": 4, "logsumexp": 6,
    "repeat_interleave": 4, "argsort": 5, "median": 4, "linalg_cholesky_ex": 3,
    "_linalg_check_errors": 2,
}  # fmt: skip
"""Kernels per operation, if more than one."""

SYNCS = {
    "_local_scalar_dense": 1, "nonzero": 1, "masked_select": 1, "equal": 1, "_unique2": 1,
    "isin": 2, "unique_dim": 1, "unique_consecutive": 1, "bincount": 2, "is_nonzero": 1,
    "_linalg_check_errors": 1, "linalg_solve": 1, "linalg_inv": 1, "linalg_eigh": 1, "histc": 2,
}  # fmt: skip
"""Operations whose result the host waits for."""

FREE = frozenset({
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted",
    "lift_fresh", "detach", "_unsafe_view", "alias", "set_", "resize_", "record_stream", "lift",
    "_reshape_alias",
})  # fmt: skip
"""Operations that launch nothing."""

READS_A_PART = frozenset({"index", "index_select", "gather", "embedding", "take", "take_along_dim"})
"""Operations that read as many bytes as they return."""


@dataclass(slots=True)
class Count:
    """The launches and waits of one line.

    Attributes:
        launches: kernel launches.
        syncs: waits of the host.
        busy: modelled GPU seconds.
        host: measured seconds that the host computed on CPU tensors.
        names: how often each operation ran; "!" marks those that wait.
    """

    launches: int = 0
    syncs: int = 0
    busy: float = 0.0
    host: float = 0.0
    names: Counter[str] = field(default_factory=Counter)

    def add(self, other: Count) -> None:
        """Add the numbers of `other`."""
        self.launches += other.launches
        self.syncs += other.syncs
        self.busy += other.busy
        self.host += other.host
        self.names.update(other.names)

    @property
    def seconds(self) -> float:
        """Modelled: the GPU works while the host launches, and idles while the host computes."""
        asking = self.launches * LAUNCH_SECONDS + self.syncs * SYNC_SECONDS
        return max(asking, self.busy) + self.host


class Ledger:
    """The counts of one run.

    Attributes:
        counts: by stage and line.
        attention: calls of attention by kernel, shapes and line.
        refused: operations that CUDA would refuse, and where.
    """

    def __init__(self) -> None:
        self.counts: defaultdict[tuple[str, str], Count] = defaultdict(Count)
        self.attention: Counter[tuple[str, str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self._stages = ["other"]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block under `name`."""
        self._stages.append(name)
        try:
            yield
        finally:
            self._stages.pop()

    def note(
        self, name: str, *, launches: int = 0, syncs: int = 0, moved: int = 0, flops: int = 0,
        kind: str = "product", seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """Count an operation that moves `moved` bytes, or takes `seconds` if that is longer."""
        count = self._here()
        count.launches += launches
        count.syncs += syncs
        work = max(moved / BYTES_A_SECOND, flops / FLOPS_A_SECOND[kind], seconds)
        count.busy += max(work, 2e-6 * launches)
        count.names[name + "!" * bool(syncs)] += 1

    def note_host(self, seconds: float) -> None:
        """Count an operation on CPU tensors."""
        self._here().host += seconds

    def note_attention(self, kernel: str, shape: str) -> None:
        """Count a call of attention by the kernel that it runs."""
        self.attention[kernel, shape, line_of_caller()] += 1

    def refuse(self, why: str) -> None:
        """Note an operation that would raise on CUDA."""
        self.refused[f"{why} at {line_of_caller()}"] += 1

    def _here(self) -> Count:
        return self.counts[self._stages[-1], line_of_caller()]

    def total(self, by: int | None = None) -> dict[str, Count]:
        """Sums by stage (0) or by line (1); if `by` is None, the total under ""."""
        found: defaultdict[str, Count] = defaultdict(Count)
        for key, count in self.counts.items():
            found["" if by is None else key[by]].add(count)
        return found


def line_of_caller() -> str:
    """The innermost line of gracekv that is running, "(model)" within transformers."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/gracekv/" in name:
            return f"{name.rpartition('/gracekv/')[2]}:{frame.f_lineno}"
        if "/transformers/" in name:
            return "(model)"
        frame = frame.f_back
    return "(driver)"


def size(x: torch.Tensor) -> int:
    """Bytes moved when `x` is read; for an expanded tensor, those of its storage."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
