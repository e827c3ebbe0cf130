"""The interface of distortions (what merging or dropping costs), and the splitter for all."""

from __future__ import annotations

import abc

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
_SMALL_GRID = {"cpu": 1 << 17, "cuda": 1 << 22}

# Indices of nodes of similar length (or all of them), and their costs.
_Group = tuple[Tensor | slice, IntervalCosts]


class TableSplitter(Splitter):
    """Compute the costs of all prefixes and suffixes, and let the refiner choose.

    Args:
        batch: the nodes' trees.
        evaluator: computes the costs.
        refiner: chooses the children.
    """

    def __init__(self, batch: TreeBatch, evaluator: DistortionEvaluator, refiner: Refiner) -> None:
        self._batch, self._evaluator, self._refiner = batch, evaluator, refiner
        self._longest: int | None = None

    def roots(self, nodes: Nodes) -> RootCosts:
        groups = self._evaluated(nodes)
        distortion = torch.empty(len(nodes), dtype=torch.float64, device=nodes.tree.device)
        drop = torch.empty_like(distortion)
        for index, intervals in groups:
            distortion[index] = intervals.suffix[:, 0].double()
            drop[index] = intervals.drop.double()

        def split(chosen: Tensor, forced: Tensor) -> Split:
            own = _selected(groups, chosen, len(nodes))
            return self._refined(nodes[chosen], distortion[chosen], forced, own)

        return RootCosts(distortion, drop, split)

    def __call__(self, nodes: Nodes, distortion: Tensor, forced: Tensor) -> Split:
        return self._refined(nodes, distortion, forced, self._evaluated(nodes))

    def _evaluated(self, nodes: Nodes) -> list[_Group]:
        groups = [
            (index, self._evaluator(nodes[index])) for index in _by_length(nodes, self._longest)
        ]
        # Children are no longer than their parents, which saves looking.
        self._longest = max(intervals.mass.shape[1] for _, intervals in groups)
        return groups

    def _refined(
        self, nodes: Nodes, distortion: Tensor, forced: Tensor, groups: list[_Group]
    ) -> Split:
        """The refiner's children of nodes whose costs were computed in groups."""
        parts = []
        for index, intervals in groups:
            table = CostTable(
                nodes[index], self._batch, intervals, distortion[index], forced[index]
            )
            parts.append(self._children(table))
        if len(parts) == 1 and isinstance(groups[0][0], slice):
            return parts[0]
        # Back to the order of the nodes; places without a child lie at a node's end.
        places = max(part.start.shape[1] for part in parts)
        start = nodes.end[:, None].repeat(1, places)
        whole = Split(start, start.clone(), distortion.new_zeros(start.shape))
        for (index, _), part in zip(groups, parts, strict=True):
            own = part.start.shape[1]
            for field in ("start", "end", "distortion"):
                getattr(whole, field)[index, :own] = getattr(part, field)
        return whole

    def _children(self, table: CostTable) -> Split:
        rule = self._refiner.rule()
        if rule is None:
            return table.split(self._refiner(table.nodes, table))
        low, high = rule(table)
        return Split.of_cuts(table.nodes, low, high, table.outer_costs(low, high))


def _by_length(nodes: Nodes, longest: int | None) -> list[Tensor] | list[slice]:
    """Indices of nodes of similar length, ascending, a group per power of two.

    Grids are as wide as the longest node; one long node must not widen many rows. Few nodes are
    one group. No node has more tokens than `longest`; None: unknown.
    """
    most = int(nodes.length.max()) if longest is None else longest
    if len(nodes) * most < _SMALL_GRID.get(nodes.tree.device.type, 1 << 17):
        return [slice(None)]
    length = nodes.length
    power = torch.ceil(torch.log2(length.float())).long()
    counts = torch.bincount(power)
    return list(power.argsort(stable=True).split(counts[counts > 0].tolist()))


def _selected(groups: list[_Group], chosen: Tensor, nodes: int) -> list[_Group]:
    """The groups with only the nodes at `chosen`, of so many `nodes`, which are numbered anew."""
    if isinstance(groups[0][0], slice):
        return [(groups[0][0], groups[0][1][chosen])]
    place = torch.full((nodes,), -1, device=chosen.device)
    place[chosen] = torch.arange(len(chosen), device=chosen.device)
    selected: list[_Group] = []
    for index, intervals in groups:
        own = place[index]
        kept = torch.nonzero(own >= 0).flatten()
        if len(kept):
            selected.append((own[kept], intervals[kept]))
    return selected
