"""What `construction.py` compares with: work that cannot be avoided, at the machine's own speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gracekv.linalg import linear
from gracekv.tree import Nodes
from gracekv.tree.prototype_numba import NumbaEvaluator
from gracekv.tree.prototype_torch import TorchEvaluator
from gracekv.tree.prototype_triton import TritonEvaluator


@dataclass
class Judged:
    """What the trees' distortion was asked for: tokens of nodes, and multiply-adds.

    Attributes:
        dim: d.
        probes: P, at most.
        tokens: of all nodes judged.
        products: multiply-adds that no way of answering can avoid.
    """

    dim: int
    probes: int = 64
    tokens: int = 0
    products: float = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what every evaluator is asked meanwhile."""
        evaluators = {
            NumbaEvaluator: "fill",
            TorchEvaluator: "__call__",
            TritonEvaluator: "__call__",
        }
        before = {kind: getattr(kind, name) for kind, name in evaluators.items()}

        def wrap(call: Any) -> Any:
            def counted(evaluator: Any, nodes: Nodes, *rest: Any) -> Any:
                self._count(nodes, rest[-1].get("most") if rest else None)
                return call(evaluator, nodes, *rest)

            return counted

        for kind, name in evaluators.items():
            setattr(kind, name, wrap(before[kind]))
        try:
            yield
        finally:
            for kind, name in evaluators.items():
                setattr(kind, name, before[kind])

    def _count(self, nodes: Nodes, cuts: int | None) -> None:
        """Both readings of the nodes; of a splitter, at most the sides of its cuts and a token."""
        n = nodes.length.double()
        intervals = 2 * n if cuts is None else (2 * (n - 2)).clamp(0, 2 * (cuts + 2))
        # Logits of prototypes and M.v~ of each interval; cross terms of M; the Gram matrix.
        pairs = n * n * (self.probes + self.dim / 2)
        pairs += intervals * self.probes * (self.dim + n / 2)
        self.tokens += int(n.sum())
        self.products += float(torch.where(intervals > 0, pairs, 0.0).sum())


def products_per_second(device: str) -> float:
    """Multiply-adds of a large float32 matrix product, the best of five."""
    x, w = (torch.randn(n, 1024, device=device) for n in (2048, 8192))
    times = []
    for _ in range(6):
        start = time.perf_counter()
        linear(x, w)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(2048 * 8192 * 1024 / min(times[1:]))
