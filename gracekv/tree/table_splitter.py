"""`TableSplitter`: compute all costs, then call the refiner; for any distortion and refiner."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.kernels.ragged import rows
from gracekv.tree.cost_table import CostTable
from gracekv.tree.distortion import DistortionEvaluator
from gracekv.tree.nodes import IntervalCosts, Nodes
from gracekv.tree.refine import Refiner
from gracekv.tree.split import RootCosts, Split, Splitter
from gracekv.tree.tree_batch import TreeBatch

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
        counts, starts, ends, distortions = [], [], [], []
        for index, intervals in groups:
            table = CostTable(nodes[index], self._batch, intervals, distortion[index])
            children = self._refiner(table.nodes, table)
            counts.append(children.count)
            starts.append(children.start)
            ends.append(children.end)
            parent = rows(children.count)
            distortions.append(table.of_children(parent, children.start, children.end))
        if not counts:
            none = torch.empty(0, dtype=torch.int64, device=nodes.tree.device)
            return Split(none, none, none, none.double())
        order = torch.cat([index for index, _ in groups])
        count = torch.zeros_like(nodes.tree)
        count[order] = torch.cat(counts)
        # Back to the order of the nodes: sort the children by their parent's index.
        place = torch.repeat_interleave(order, torch.cat(counts)).argsort(stable=True)
        return Split(
            count, torch.cat(starts)[place], torch.cat(ends)[place], torch.cat(distortions)[place]
        )


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
