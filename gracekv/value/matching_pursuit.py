"""Picks tokens one by one, each time the one that best explains the residual attention mass."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor

from gracekv.kernels.linalg import batched_linear, capped
from gracekv.prefill import LayerCapture, Needs, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer
from gracekv.value.repeated_attention import RepeatedQueries


@SCORERS.register("matching_pursuit", works_sharded=True)
class MatchingPursuit(Scorer):
    """Orthogonal matching pursuit of a repetition's attention mass, head by head.

    A query's unnormalised attention to the compressible tokens sums to its mass. Each step takes
    the token whose column has the largest product with the residual of all queries' masses, given
    the least-squares multiplicities, clipped to be positive, of the tokens taken so far. Scores are
    ranks in this order, so any budget takes the first tokens; after `most` tokens, the root mean
    square of attention decides. The question is not read.

    Source: Zweiger et al. (2026), Attention Matching, arXiv:2602.16284, "OMP" of its code. Ours:
    tokens of negligible multiplicity are not replaced at the end.

    Cost: a second pass over the context, and `most` sequential steps of O(H Q T) in each layer.

    Attributes:
        count: number of queries of the repetition, evenly spaced.
        most: maximum number of tokens that a head takes in this order.
        largest: maximum multiplicity (e^7).
    """

    count: int = bounded(512, at_least=1)
    most: int = bounded(1024, at_least=1)
    largest: float = bounded(math.exp(7), above=0)

    def needs(self) -> Needs:
        """The queries of the second pass."""
        return Needs.observed(RepeatedQueries(self.count))

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """[G, N], not normalised. Raises `MissingCaptureError` without the second pass."""
        keys = capture.keys[:, region.start : region.end].float()
        asked = capture.observation(RepeatedQueries(self.count)).to(keys.device).float()
        asked = rearrange(asked * capture.scale, "(g n) q d -> g (n q) d", g=len(keys))
        mass = capped(batched_linear(asked, keys.contiguous()), capture.softcap)
        mass.sub_(mass.amax(dim=-1, keepdim=True)).exp_()
        scores = (mass / mass.sum(dim=-1, keepdim=True)).square_().mean(dim=1).sqrt_()
        taken = pursued(mass, self.most, self.largest)
        # A root mean square of attention never exceeds 1.
        ranks = torch.arange(taken.shape[1], 0, -1, device=keys.device).float() + 1.0
        return scores.scatter_(1, taken, ranks.expand(taken.shape))


def pursued(mass: Tensor, most: int, largest: float) -> Tensor:
    """Columns of mass [G, M, N] in the order of the pursuit: int64 [G, min(most, M, N)].

    Each step adds one column to the least-squares problem of the previous step: its component
    orthogonal to the basis extends that basis. A column without such a component gets no
    multiplicity.
    """
    groups, rows, length = mass.shape
    count, target = min(most, rows, length), mass.sum(dim=-1)
    basis, columns = mass.new_zeros(2, groups, rows, count)
    upper = torch.eye(count, dtype=mass.dtype, device=mass.device).repeat(groups, 1, 1)
    along, missing = mass.new_zeros(groups, count, 1), target
    taken = torch.zeros(groups, count, dtype=torch.int64, device=mass.device)
    gone = torch.zeros(groups, length, dtype=torch.bool, device=mass.device)
    for i in range(count):
        end = i + 1
        gain = (missing[:, None] @ mass)[:, 0].masked_fill_(gone, -torch.inf)
        best = gain.argmax(dim=1, keepdim=True)
        taken[:, i:end] = best
        gone.scatter_(1, best, True)
        column = mass.gather(2, best[:, None].expand(-1, rows, 1))
        columns[..., i:end], rest, known = column, column, basis[..., :i]
        # Orthogonalise twice, since the rounding errors of one pass add up.
        for _ in range(2):
            parts = known.mT @ rest
            rest = rest - known @ parts
            upper[:, :i, i:end] += parts
        size = rest.norm(dim=1, keepdim=True)
        fresh = size > 1e-6 * column.norm(dim=1, keepdim=True)
        basis[..., i:end] = torch.where(fresh, rest / size, 0.0)
        upper[:, i, i] = torch.where(fresh, size, 1.0)[:, 0, 0]
        along[:, i] = (basis[..., i] * target).sum(dim=1, keepdim=True)
        solved = torch.linalg.solve_triangular(upper[:, :end, :end], along[:, :end], upper=True)
        missing = target - (columns[..., :end] @ solved.clamp_(1e-12, largest))[..., 0]
    return taken
