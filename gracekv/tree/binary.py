"""`binary`: cut in two where the trajectory turns and distortion falls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gracekv.errors import ConfigError
from gracekv.tree.distortion import CostTable, Nodes
from gracekv.tree.refine import REFINERS, Children, Proposal, Refiner, Rule


def normalized_curvature(kappa: Tensor, valid: Tensor) -> Tensor:
    """kappa-hat [V, w]: min-max normalised over each node's own tokens, 0 where constant.

    Source: departures 5.
    """
    low = kappa.masked_fill(~valid, torch.inf).amin(dim=1, keepdim=True)
    span = kappa.masked_fill(~valid, -torch.inf).amax(dim=1, keepdim=True) - low
    return torch.where(span > 0, (kappa - low) / span.clamp(min=torch.finfo(span.dtype).tiny), 0.0)


def is_candidate(nodes: Nodes, inner: Tensor, kappa: Tensor | None, k: int | None) -> Tensor:
    """bool [V, w]: the midpoint and the `k` inner tokens of highest kappa (ties: the earlier).

    All inner tokens if `k` is None. Source: Eq. (T8).
    """
    if k is None or (kappa is not None and k >= inner.shape[1] - 1):
        return inner
    middle = (nodes.start + nodes.end) // 2 - nodes.start
    chosen = torch.arange(inner.shape[1], device=inner.device) == middle[:, None]
    if kappa is not None and k > 0:
        order = kappa.masked_fill(~inner, -torch.inf).argsort(dim=1, descending=True, stable=True)
        chosen = chosen.scatter(1, order[:, :k], True)
    return chosen & inner


def binary_proposal(
    nodes: Nodes, table: CostTable, candidates: int | None, reward: float
) -> Proposal:
    """The best cut of each node: argmax of D(I) - D(left) - D(right) + reward * kappa-hat.

    Source: Eqs. (T8) and (T10); ties go to the smaller position.
    """
    inner = table.valid.clone()
    inner[:, 0] = False
    kappa = table.curvatures() if candidates or reward else None
    chosen = is_candidate(nodes, inner, kappa, candidates)
    gain = table.whole - table.before - table.onward
    if kappa is not None and reward:
        gain += reward * normalized_curvature(kappa, table.valid)
    best = gain.masked_fill_(~chosen, -torch.inf).max(dim=1)
    at = nodes.start + best.indices
    return Proposal(low=at, high=at, utility=best.values)


@final
@REFINERS.register("binary")
@dataclass(frozen=True)
class Binary(Refiner):
    """Curvature-aligned binary splits only, no extraction.

    Source: Eq. (T8); departures 5.

    Cost: looks up at most 17 cuts of a node among the ends that the distortion judged.

    Attributes:
        candidates: cuts considered besides the midpoint, the paper's 16.
        reward: lambda_kappa, weight of the normalised curvature, the paper's 0.05.
    """

    candidates: int = 16
    reward: float = 0.05

    def __post_init__(self) -> None:
        check_cut_fields(self.candidates, self.reward)

    @property
    def uses_curvature(self) -> bool:
        return self.candidates > 0 or self.reward > 0

    def rule(self) -> Rule:
        return Rule(self.candidates, self.reward, lifts=False)

    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        best = binary_proposal(nodes, table, self.candidates, self.reward)
        return Children.of_cuts(nodes, best.low, best.high)


def check_cut_fields(candidates: int, reward: float) -> None:
    """`ConfigError` unless both are non-negative."""
    if candidates < 0 or reward < 0:
        raise ConfigError(
            f"Binary cuts take candidates >= 0 and reward >= 0; got candidates={candidates}, "
            f"reward={reward}. 0 leaves only the midpoint."
        )
