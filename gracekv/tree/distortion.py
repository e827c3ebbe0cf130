"""The interface of distortions, the costs of merging or dropping tokens."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from gracekv.prefill import PrefillReader
from gracekv.registry import Registry, Strategy
from gracekv.tree.base import IntervalCosts, Nodes, RootCosts, Split, Splitter
from gracekv.tree.refine import CostTable, Refiner
from gracekv.tree.tree_batch import TreeBatch, TreeContext, Workspace


class DistortionEvaluator(abc.ABC):
    """Computes the distortion of nodes in the trees of some layers.

    A node of n tokens has 2n relevant intervals, its prefixes and suffixes; one running pass in
    each direction computes all of them.
    """

    @abc.abstractmethod
    def __call__(self, nodes: Nodes) -> IntervalCosts:
        """The costs of V >= 1 nodes, best of similar lengths: the longest sets the grid's width."""

    def splitter(self, refiner: Refiner) -> Splitter | None:
        """A splitter that computes costs and splits in one pass, or None."""
        return None


class Distortion(PrefillReader, Strategy, abc.ABC):
    """Measures the loss if an interval is stored as one entry, or not at all.

    Deterministic, float32 or better. D of a single token is exactly 0.
    """

    @abc.abstractmethod
    def evaluator(self, batch: TreeBatch, workspace: Workspace) -> DistortionEvaluator:
        """Return the evaluator for the trees of some layers on one device.

        Args:
            batch: these trees.
            workspace: scratch memory for one call at a time, and memory that the evaluator keeps
                until the next evaluator of the same workspace overwrites it.
        """

    def probes(self, context: TreeContext) -> Tensor | None:
        """Positions whose queries the evaluators read, int64 [P] ascending, or None."""
        return None


DISTORTIONS = Registry("distortion", "what merging or dropping tokens costs", Distortion)


# Smaller grids are not divided by length, since another call costs more than padding.
_SMALL_GRID = {"cpu": 1 << 17, "cuda": 1 << 22}


class TableSplitter(Splitter):
    """Computes the costs of all prefixes and suffixes and lets the refiner choose.

    Args:
        batch: the nodes' trees.
        evaluator: computes the costs.
        refiner: chooses the children.
    """

    def __init__(self, batch: TreeBatch, evaluator: DistortionEvaluator, refiner: Refiner) -> None:
        self._batch, self._evaluator, self._refiner = batch, evaluator, refiner

    def roots(self, nodes: Nodes) -> RootCosts:
        intervals = self._evaluated(nodes)
        distortion = intervals.suffix[:, 0].double()

        def split(chosen: Tensor, forced: Tensor) -> Split:
            return self._split(nodes[chosen], distortion[chosen], forced, intervals[chosen])

        return RootCosts(distortion, intervals.drop.double(), split)

    def __call__(self, nodes: Nodes, distortion: Tensor, forced: Tensor) -> Split:
        return self._split(nodes, distortion, forced, self._evaluated(nodes))

    def _split(
        self, nodes: Nodes, distortion: Tensor, forced: Tensor, intervals: IntervalCosts
    ) -> Split:
        table = CostTable(nodes, self._batch, intervals, distortion, forced)
        rule = self._refiner.rule()
        return table.split(self._refiner(nodes, table)) if rule is None else rule.split(table)

    def _evaluated(self, nodes: Nodes) -> IntervalCosts:
        """The costs of the nodes; those of similar length are evaluated together.

        Grids are as wide as their longest node, so one long node must not widen many rows.
        """
        device, width = nodes.tree.device, nodes.width
        if len(nodes) * width < _SMALL_GRID.get(device.type, 1 << 17):
            return self._evaluator(nodes)
        power = torch.ceil(torch.log2(nodes.length.float())).long()
        counts = torch.bincount(power)
        groups = power.argsort(stable=True).split(counts[counts > 0].tolist())
        parts = [self._evaluator(nodes[index]) for index in groups]
        costs = torch.zeros(2, len(nodes), width, device=device, dtype=torch.float32)
        mass, drop = torch.zeros_like(costs[0]), torch.empty_like(costs[0, :, 0])
        for index, part in zip(groups, parts, strict=True):
            own = part.mass.shape[1]
            costs[:, index, :own], mass[index, :own], drop[index] = part.costs, part.mass, part.drop
        return IntervalCosts(costs, mass, drop)
