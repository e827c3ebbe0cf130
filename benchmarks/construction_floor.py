"""The least work of construction, at the machine's speed: a comparison for `construction.py`."""

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
    """The nodes whose distortion was computed: their tokens, and the multiply-adds they need.

    Attributes:
        dim: d.
        probes: P, at most.
        tokens: of all nodes.
        multiply_adds: those that every algorithm needs.
    """

    dim: int
    probes: int = 64
    tokens: int = 0
    multiply_adds: float = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which the work of every evaluator is counted."""
        kinds: tuple[Any, ...] = (NumbaEvaluator, TorchEvaluator, TritonEvaluator)
        originals = {kind: kind.__call__ for kind in kinds}

        def wrap(call: Any) -> Any:
            def counted(evaluator: Any, nodes: Nodes) -> Any:
                self._count(nodes)
                return call(evaluator, nodes)

            return counted

        for kind in kinds:
            kind.__call__ = wrap(originals[kind])
        try:
            yield
        finally:
            for kind in kinds:
                kind.__call__ = originals[kind]

    def _count(self, nodes: Nodes) -> None:
        """All prefixes and suffixes."""
        n = nodes.length.double()
        intervals = 2 * n
        # Logits of prototypes and M.v~ of each interval; cross terms of M; the Gram matrix.
        pairs = n * n * (self.probes + self.dim / 2)
        pairs += intervals * self.probes * (self.dim + n / 2)
        self.tokens += int(n.sum())
        self.multiply_adds += float(pairs.sum())


def multiply_adds_per_second(device: str) -> float:
    """Of a large float32 matrix product, the best of five."""
    x, w = (torch.randn(n, 1024, device=device) for n in (2048, 8192))
    times = []
    for _ in range(6):
        start = time.perf_counter()
        linear(x, w)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(2048 * 8192 * 1024 / min(times[1:]))
