"""Mean and covariance of the queries before rotation, added up over runs of positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.kernels.rope import Rope

# Bytes of one block's largest float32 temporary, [H, block, d].
_BLOCK = 16 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class QueryMoments:
    """Statistics of the queries of a run of positions, one Gaussian per query head.

    Attributes:
        start: first position that counts, absolute.
        end: exclusive.
        means: L tensors [H, d] float32.
        covariances: L tensors [H, d, d] float32, over n.
    """

    start: int
    end: int
    means: tuple[Tensor, ...]
    covariances: tuple[Tensor, ...]


class QuerySums:
    """Running sums of one layer's queries before rotation.

    Sums run in float64 over blocks of positions, around the first block's mean, so that a large
    mean costs no digits.
    """

    def __init__(self) -> None:
        self._count = 0
        self._pivot = self._total = self._square = torch.empty(0)

    def add(self, queries: Tensor, rope: Rope, first: int = 0) -> None:
        """Count the queries [H, n, d] of rows first, first + 1, ... of the table `rope`."""
        heads, count, dim = queries.shape
        size = max(64, _BLOCK // (4 * heads * dim))
        for start in range(0, count, size):
            some = queries[:, start : start + size].float()
            at = torch.arange(first + start, first + start + some.shape[1], device=queries.device)
            plain = rope.unrotate(some, at)
            if not self._count:
                self._pivot = plain.mean(dim=1, keepdim=True)
                self._total = torch.zeros_like(self._pivot, dtype=torch.float64)
                self._square = self._total.transpose(1, 2) @ self._total
            rows = plain - self._pivot
            self._total += rows.sum(dim=1, keepdim=True, dtype=torch.float64)
            self._square += (rows.transpose(1, 2) @ rows).double()
            self._count += some.shape[1]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean [H, d] and covariance [H, d, d] (over n) of at least one query, float32."""
        away = self._total / self._count
        covariance = self._square / self._count - away.transpose(1, 2) @ away
        return (self._pivot + away)[:, 0].float(), covariance.float()
