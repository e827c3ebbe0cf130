"""`least_squares`: bounded masses, then plain least squares for values (Attention Matching)."""

from __future__ import annotations

import math
from dataclasses import field, replace

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.errors import ConfigError
from gracekv.fit.attended import Reference, kept_attention, scatter
from gracekv.fit.base import FITTERS, ReferenceQueries
from gracekv.fit.values import QueryFitter, ridge
from gracekv.prefill import LayerCapture, Region
from gracekv.registry import bounded
from gracekv.value import Memory


@FITTERS.register("least_squares")
class LeastSquares(QueryFitter):
    r"""Fits multiplicities by bounded and values by plain least squares (Attention Matching).

    Only compressible tokens count, both original and kept ones. Let e_t be the
    unnormalised attention of a reference query to kept entry t, Z the sum of its attention over all
    those tokens, and o its output over them. The multiplicities m minimise the sum over queries of
    |sum_t m_t e_t - Z|^2 between `least` and `most`: the least-squares solution is clipped, then
    `steps` projected gradient steps follow. With p the attention over the kept entries under these
    multiplicities, the values X minimise the sum of |p X - o|^2. X is not regularised towards the
    original values, except by a ridge of 1e-6 if entries are linearly dependent, as in the public
    code.

    Source: Zweiger et al. (2026), Attention Matching, arXiv:2602.16284, with the numbers of its
    code. Ours: power iteration starts from a constant vector, not a random one, and all reference
    queries have the same weight.

    Cost: the attention of the reference queries over all keys, O(L H Q T d), and two least-squares
    problems for each head, with Q H/G rows and as many unknowns as the head has entries.

    Attributes:
        queries: reference queries; by default those of a repetition of the context.
        least: smallest multiplicity (e^-3).
        most: largest multiplicity (e^3).
        steps: projected gradient steps (2).
    """

    queries: ReferenceQueries = field(default_factory=lambda: ReferenceQueries(tail=0, repeat=4096))
    least: float = bounded(math.exp(-3), above=0)
    most: float = bounded(math.exp(3), above=0)
    steps: int = bounded(2, at_least=0)

    def check(self) -> None:
        if self.least >= self.most:
            raise ConfigError(f"least_squares takes least < most; got {self.least}, {self.most}.")

    def reference(self, capture: LayerCapture, region: Region, memory: Memory) -> Reference:
        return Reference.of(capture, replace(self.queries(capture, region, memory), within=region))

    def layer(self, packed: RaggedEntries, reference: Reference, region: Region) -> RaggedEntries:
        attention = kept_attention(reference, packed, region)
        values, factor = attention.values.clone(), torch.ones_like(attention.values[..., 0])
        for head, free in enumerate(attention.free):
            if not bool(free.any()):
                continue
            mass, total = attention.mass[head][:, free], attention.total[head]
            factors = bounded_masses(mass, total, self.least, self.most, self.steps)
            shares = mass * factors
            shares /= shares.sum(dim=1, keepdim=True).clamp_min(1e-30)
            values[head, free] = solve(shares, attention.output[head])
            factor[head, free] = factors
        # The range of bfloat16.
        fitted = values.nan_to_num_(0.0).clamp_(-3e38, 3e38)
        log_m = packed.log_multiplicity[attention.columns] + factor.log()
        values = scatter(packed.values, attention, fitted)
        log_m = scatter(packed.log_multiplicity, attention, log_m)
        return replace(packed, values=values, log_multiplicity=log_m)


def bounded_masses(mass: Tensor, total: Tensor, least: float, most: float, steps: int) -> Tensor:
    """float32 [W]: m within bounds for which mass [M, W] m is close to total [M]."""
    masses = solve(mass, total[:, None])[:, 0].clamp_(least, most)
    if steps:
        # The square of the largest singular value, by power iteration.
        along = torch.ones_like(masses)
        for _ in range(3):
            along = mass.T @ (mass @ along)
            along /= along.norm().clamp_min(1e-30)
        size = (mass @ along).square().sum().clamp_min(1e-6)
        for _ in range(steps):
            masses = (masses - mass.T @ (mass @ masses - total) / size).clamp_(least, most)
    return masses


def solve(rows: Tensor, target: Tensor) -> Tensor:
    """float32 [W, d]: the minimum-norm x for which rows [M, W] x is closest to target [M, d].

    It is found by QR, or with a ridge of 1e-6 where a pivot is exactly 0. As in the published code,
    columns that are alike up to rounding get long solutions, whose parts cancel.
    """
    try:
        found: Tensor = torch.linalg.lstsq(rows, target, driver="gels").solution
        if bool(found.isfinite().all()):
            return found
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass
    rows, target = rows.double(), target.double()
    inverse = rows.new_full((1, rows.shape[1]), 1e6)
    return ridge(rows[None], target[None], rows.new_ones(len(rows)), inverse)[0].float()
