"""The interface of refiners: into which children a node splits."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gracekv.registry import Registry, Strategy
from gracekv.tree.distortion import CostTable, Nodes


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """The children of some nodes, in the nodes' order, each node's by start.

    Attributes:
        count: int64 [V], children of each node: at least 2, or 0 to leave the node a leaf.
        start: int64 [sum(count)].
        end: int64 [sum(count)].
    """

    count: Tensor
    start: Tensor
    end: Tensor

    @classmethod
    def of_cuts(cls, nodes: Nodes, low: Tensor, high: Tensor) -> Children:
        """The non-empty ones of [start, low), [low, high), [high, end); int64 [V] cuts."""
        bounds = torch.stack([nodes.start, low, high, nodes.end], dim=1)
        start, end = bounds[:, :3], bounds[:, 1:]
        real = start < end
        return cls(real.sum(dim=1), start[real], end[real])


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """One way to refine each node.

    Attributes:
        low: int64 [V] first cut.
        high: int64 [V] second cut; equal to `low` for a binary split.
        utility: [V] float64 gain per added entry (rho); NaN-free, may be negative.
    """

    low: Tensor
    high: Tensor
    utility: Tensor


@dataclass(frozen=True, slots=True)
class Rule:
    """A refiner in numbers, for engines that judge and split in one pass.

    Attributes:
        cuts: tokens of highest kappa that a cut is considered at, besides the middle; None: nodes
            are not cut.
        reward: lambda_kappa.
        lifts: whether the salient token may be lifted out, and a floor candidate must be.
    """

    cuts: int | None
    reward: float
    lifts: bool


class Refiner(Strategy, abc.ABC):
    """Choose the children of every node; deterministic, and each node on its own.

    Every child is a single token, or begins or ends where its node does: of other intervals nobody
    knows the distortion.

    Attributes:
        exact_roots: roots are kept as their original tokens, an entry a token, not as a prototype.
        max_cost: most entries that one of its splits adds.
        lifts_candidates: a node with a floor candidate is split by lifting the best one out.
    """

    exact_roots: ClassVar[bool] = False
    max_cost: ClassVar[float] = 2
    lifts_candidates: ClassVar[bool] = False

    @property
    def uses_curvature(self) -> bool:
        """Nodes are cut where curvature peaks, so `table` must hold kappa."""
        return False

    def rule(self) -> Rule | None:
        """What the refiner does, if numbers say all of it; None: it must be asked."""
        return None

    @abc.abstractmethod
    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        """The children of `nodes` (two tokens or more each); `table` answers about them."""


REFINERS: Registry[Refiner] = Registry("refine", "into which children a node splits")
Refiner.registry = REFINERS
