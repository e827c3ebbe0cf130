"""`Refiner`, the interface that chooses the children of a node."""

from __future__ import annotations

import abc
from typing import ClassVar

from gracekv.registry import Registry, Strategy
from gracekv.tree.cost_table import CostTable
from gracekv.tree.nodes import Children, Nodes
from gracekv.tree.split_rule import SplitRule


class Refiner(Strategy, abc.ABC):
    """Choose the children of every node, deterministically and each on its own.

    Every child is a single token, or begins or ends where its node does: distortion is computed
    only for these intervals.

    Attributes:
        exact_roots: whether roots stay as their original tokens, an entry each, not as a prototype.
        max_cost: the most entries that one split adds.
    """

    works_sharded: ClassVar[bool] = True
    exact_roots: ClassVar[bool] = False
    max_cost: ClassVar[float] = 2

    @property
    def uses_curvature(self) -> bool:
        """Whether nodes are cut where curvature peaks, so that the table must hold kappa."""
        return False

    def rule(self) -> SplitRule | None:
        """This refiner as a `SplitRule`, by which engines compute costs and split in one pass.

        None if it has to be called with a table of all costs.
        """
        return None

    @abc.abstractmethod
    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        """The children of `nodes` (two tokens or more each), chosen by their costs."""


class RuleRefiner(Refiner):
    """A refiner that is a `SplitRule`."""

    @property
    def uses_curvature(self) -> bool:
        return self.rule().uses_curvature

    @abc.abstractmethod
    def rule(self) -> SplitRule: ...

    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        low, high = self.rule()(table)
        return Children.of_cuts(nodes, nodes.start + low, nodes.start + high)


REFINERS = Registry("refine", "into which children a node splits", Refiner)
