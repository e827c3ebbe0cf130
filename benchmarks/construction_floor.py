"""A lower bound on construction time on this machine, for comparison in `construction.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gracekv.kernels.linalg import linear
from gracekv.tree import Nodes
from gracekv.tree.engines.numba import NumbaEvaluator
from gracekv.tree.engines.torch import TorchEvaluator
from gracekv.tree.engines.triton import TritonEvaluator


@dataclass
class DistortionWork:
    """Nodes whose distortion was computed: their tokens and the multiply-adds they need.

    Attributes:
        dim: d.
        probes: P, at most.
        tokens: tokens of all nodes.
        multiply_adds: those that every algorithm needs.
    """

    dim: int
    probes: int = 64
    tokens: int = 0
    multiply_adds: float = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context manager that counts the work of every evaluator."""
        methods = {NumbaEvaluator: "run", TorchEvaluator: "__call__", TritonEvaluator: "__call__"}
        originals = {kind: getattr(kind, name) for kind, name in methods.items()}

        def wrap(call: Any) -> Any:
            def counted(evaluator: Any, nodes: Nodes, *rest: Any) -> Any:
                self._count(nodes, rest[-1].get("cuts") if rest else None)
                return call(evaluator, nodes, *rest)

            return counted

        for kind, name in methods.items():
            setattr(kind, name, wrap(originals[kind]))
        try:
            yield
        finally:
            for kind, name in methods.items():
                setattr(kind, name, originals[kind])

    def _count(self, nodes: Nodes, cuts: int | None) -> None:
        """All prefixes and suffixes; for a splitter, at most the sides of its cuts and a token."""
        n = nodes.length.double()
        intervals = 2 * n if cuts is None else (2 * (n - 2)).clamp(0, 2 * (cuts + 2))
        # Logits of prototypes and M.v~ of each interval; cross terms of M; the Gram matrix.
        pairs = n * n * (self.probes + self.dim / 2)
        pairs += intervals * self.probes * (self.dim + n / 2)
        self.tokens += int(n.sum())
        self.multiply_adds += float(torch.where(intervals > 0, pairs, 0.0).sum())


def multiply_adds_per_second(device: str) -> float:
    """Speed of a large float32 matrix product, best of five."""
    x, w = (torch.randn(n, 1024, device=device) for n in (2048, 8192))
    times = []
    for _ in range(6):
        start = time.perf_counter()
        linear(x, w)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(2048 * 8192 * 1024 / min(times[1:]))
