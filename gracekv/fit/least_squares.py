"""`least_squares`: bounded masses and plain least squares for values, as Attention Matching."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import field

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.errors import ConfigError
from gracekv.fit.attended import Reference, attended, scattered
from gracekv.fit.base import FITTERS, ReferenceQueries
from gracekv.fit.values import QueryFitter, ridge
from gracekv.prefill import LayerCapture, Region
from gracekv.registry import bounded
from gracekv.value import Memory


@FITTERS.register("least_squares")
class LeastSquares(QueryFitter):
    r"""Masses by bounded least squares, then values by plain least squares (Attention Matching).

    Only the compressible tokens count, in the context as in what is kept of it. With e_t the
    unnormalised attention of a reference query to kept entry t, Z its sum over all those tokens and
    o its output over them, the multiplicities m minimise the sum of |sum_t m_t e_t - Z|^2 between
    `least` and `most`: the least-squares solution is clipped, and `steps` projected gradient steps
    follow. The values X then minimise the sum of |p X - o|^2, where p is the attention over the
    kept entries with these multiplicities. Nothing holds them to the original values. Where the
    entries depend on each other a ridge of 1e-6 does, as in the public code.

    Source: Zweiger et al. (2026), Attention Matching, arXiv:2602.16284, with the numbers of its
    code. Ours: power iteration starts from equal numbers, not from random ones; reference queries
    are weighed alike by the recipe.

    Cost: attention of the reference queries over all keys, O(L H Q T d), and for each head two
    least-squares problems of Q H/G rows and as many unknowns as entries, on their own.

    Attributes:
        queries: reference queries, by default of a repetition.
        least: smallest multiplicity (e^-3).
        most: largest multiplicity (e^3).
        steps: projected gradient steps (2).
    """

    queries: ReferenceQueries = field(default_factory=lambda: ReferenceQueries(tail=0, repeat=512))
    least: float = bounded(math.exp(-3), above=0)
    most: float = bounded(math.exp(3), above=0)
    steps: int = bounded(2, at_least=0)

    def check(self) -> None:
        if self.least >= self.most:
            raise ConfigError(
                f"least_squares takes least < most; got {self.least} and {self.most}."
            )

    def reference(self, capture: LayerCapture, region: Region, memory: Memory) -> Reference:
        queries = self.queries(capture, region, memory)
        return Reference.of(capture, dataclasses.replace(queries, within=region))

    def layer(self, packed: RaggedEntries, reference: Reference, region: Region) -> RaggedEntries:
        attention = attended(reference, packed, region)
        values, factor = attention.values.clone(), torch.ones_like(attention.values[..., 0])
        for head, free in enumerate(attention.free):
            if not bool(free.any()):
                continue
            mass, total = attention.mass[head][:, free], attention.total[head]
            own = bounded_masses(mass, total, self.least, self.most, self.steps)
            shares = mass * own
            shares /= shares.sum(dim=1, keepdim=True).clamp_min(1e-30)
            values[head, free] = solved(shares, attention.output[head])
            factor[head, free] = own
        # The fit is computed in float32, whatever the dtype of the values.
        limit = min(torch.finfo(x).max for x in (packed.values.dtype, values.dtype))
        fitted = values.nan_to_num_(0.0).clamp_(-limit, limit)
        log_m = packed.log_multiplicity[attention.columns] + factor.log()
        return dataclasses.replace(
            packed,
            values=scattered(packed.values, attention, fitted),
            log_multiplicity=scattered(packed.log_multiplicity, attention, log_m),
        )


def bounded_masses(mass: Tensor, total: Tensor, least: float, most: float, steps: int) -> Tensor:
    """m float32 [W] between bounds that brings mass [M, W] m near total [M]; see `LeastSquares`."""
    found = solved(mass, total[:, None])[:, 0].clamp_(least, most)
    if steps:
        # The square of the largest singular value, by power iteration.
        along = torch.ones_like(found)
        for _ in range(3):
            along = mass.T @ (mass @ along)
            along /= along.norm().clamp_min(1e-30)
        size = (mass @ along).square().sum().clamp_min(1e-6)
        for _ in range(steps):
            found = (found - mass.T @ (mass @ found - total) / size).clamp_(least, most)
    return found


def solved(rows: Tensor, target: Tensor) -> Tensor:
    """x float32 [W, d] that brings rows [M, W] x nearest to target [M, d]; of several the shortest.

    By QR. Where that fails, since columns or rows depend on each other, by a ridge of 1e-6.
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
