"""The interface of distortions (what merging or dropping costs), and the splitter for all."""

from __future__ import annotations

import abc
from dataclasses import fields

import torch
from torch import Tensor

from gracekv.prefill import PrefillReader
from gracekv.registry import Registry, Strategy
from gracekv.tree.cost_table import CostTable
from gracekv.tree.nodes import IntervalCosts, Nodes, RootCosts, Split, Splitter
from gracekv.tree.refine import Refiner
from gracekv.tree.tree_batch import TreeBatch, TreeContext
from gracekv.tree.workspace import Workspace


class DistortionEvaluator(abc.ABC):
    """Computes the distortion of nodes in the trees of some layers.

    A node of n tokens has 2n intervals of interest, its prefixes and suffixes; all of them come
    from one running pass in each direction.
    """

    @abc.abstractmethod
    def __call__(self, nodes: Nodes) -> IntervalCosts:
        """The costs of V >= 1 nodes, best of similar length: the longest sets the grid's width."""

    def splitter(self, refiner: Refiner) -> Splitter | None:
        """A splitter that computes costs and splits in one pass; None: there is none."""
        return None


class Distortion(PrefillReader, Strategy, abc.ABC):
    """How much is lost when an interval is stored as one entry, or not at all.

    Deterministic, float32 or better. D of a single token is exactly 0.
    """

    @abc.abstractmethod
    def evaluator(self, batch: TreeBatch, workspace: Workspace) -> DistortionEvaluator:
        """Return the evaluator for the trees of some layers, which are on one device.

        Args:
            batch: these trees.
            workspace: scratch memory for one call of the evaluator at a time, and memory for what
                the evaluator keeps: the next evaluator with that workspace overwrites it.
        """

    def probes(self, context: TreeContext) -> Tensor | None:
        """Positions whose queries the evaluators read, int64 [P] ascending; None: none."""
        return None


DISTORTIONS = Registry("distortion", "what merging or dropping tokens costs", Distortion)


# Grids of fewer numbers are not divided by length: another call costs more than padding.
_SMALL_GRID = 1 << 17

# Indices of nodes of similar length, and their costs.
_Group = tuple[Tensor, IntervalCosts]


class TableSplitter(Splitter):
    """Compute the costs of all prefixes and suffixes, and let the refiner choose.

    Args:
        batch: the nodes' trees.
        evaluator: computes the costs.
        refiner: chooses the children.
    """

    def __init__(self, batch: TreeBatch, evaluator: DistortionEvaluator, refiner: Refiner) -> None:
        self._batch, self._evaluator, self._refiner = batch, evaluator, refiner

    def roots(self, nodes: Nodes) -> RootCosts:
        groups = self._evaluated(nodes)
        distortion = torch.empty(len(nodes), dtype=torch.float64, device=nodes.tree.device)
        drop = torch.empty_like(distortion)
        for index, intervals in groups:
            distortion[index] = intervals.suffix[:, 0].double()
            drop[index] = intervals.drop.double()

        def split(chosen: Tensor) -> Split:
            return self._refined(nodes[chosen], distortion[chosen], _selected(groups, chosen))

        return RootCosts(distortion, drop, split)

    def __call__(self, nodes: Nodes, distortion: Tensor) -> Split:
        return self._refined(nodes, distortion, self._evaluated(nodes))

    def _evaluated(self, nodes: Nodes) -> list[_Group]:
        return [(index, self._evaluator(nodes[index])) for index in _by_length(nodes.length)]

    def _refined(self, nodes: Nodes, distortion: Tensor, groups: list[_Group]) -> Split:
        """The refiner's children of nodes whose costs were computed in groups."""
        if not groups:
            none = torch.empty(0, dtype=torch.int64, device=nodes.tree.device)
            return Split(none, none, none, none.double())
        parts = []
        for index, intervals in groups:
            table = CostTable(nodes[index], self._batch, intervals, distortion[index])
            parts.append(table.split(self._refiner(table.nodes, table)))
        counts, *others = (torch.cat([getattr(x, f.name) for x in parts]) for f in fields(Split))
        order = torch.cat([index for index, _ in groups])
        count = torch.zeros_like(nodes.tree)
        count[order] = counts
        # Back to the order of the nodes: sort the children by their parent's index.
        place = torch.repeat_interleave(order, counts).argsort(stable=True)
        return Split(count, *(x[place] for x in others))


def _by_length(length: Tensor) -> list[Tensor]:
    """Indices of nodes of similar length, ascending, a group per power of two.

    Grids are as wide as the longest node; one long node must not widen many rows. Few nodes are
    one group.
    """
    if not len(length):
        return []
    if len(length) * int(length.max()) < _SMALL_GRID:
        return [torch.arange(len(length), device=length.device)]
    power = torch.ceil(torch.log2(length.float())).long()
    counts = torch.bincount(power)
    return list(power.argsort(stable=True).split(counts[counts > 0].tolist()))


def _selected(groups: list[_Group], chosen: Tensor) -> list[_Group]:
    """The groups with only the nodes in the mask `chosen`, which are numbered anew."""
    place = chosen.cumsum(0) - 1
    selected = []
    for index, intervals in groups:
        kept = torch.nonzero(chosen[index]).flatten()
        if len(kept):
            selected.append((place[index[kept]], intervals[kept]))
    return selected
