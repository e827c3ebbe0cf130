"""What growth asks of a distortion and a refiner together: into what nodes split, and D of that."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.tree.distortion import CostTable, DistortionEvaluator, IntervalCosts, Nodes
from gracekv.tree.items import Items
from gracekv.tree.refine import Refiner

# Numbers in a grid below which another call costs more than padding.
_FEW = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The children of some nodes, in the nodes' order, each node's by start.

    Attributes:
        count: int64 [V].
        start: int64 [sum(count)] relative to the slot.
        end: int64 [sum(count)].
        distortion: D float64 [sum(count)].
    """

    count: Tensor
    start: Tensor
    end: Tensor
    distortion: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Roots:
    """What is known of roots before it is clear which of them split.

    Attributes:
        distortion: D float64 [B].
        drop: D^drop float64 [B].
        split: the `Split` of those in a mask, bool [B], of two tokens or more each.
    """

    distortion: Tensor
    drop: Tensor
    split: Callable[[Tensor], Split]


class Splitter(abc.ABC):
    """Splits the nodes of some layers; deterministic, and each node on its own."""

    @abc.abstractmethod
    def roots(self, nodes: Nodes) -> Roots:
        """The first question, for all B >= 1 roots."""

    @abc.abstractmethod
    def __call__(self, nodes: Nodes, distortion: Tensor) -> Split:
        """The children of V >= 0 nodes below the roots, of two tokens or more, whose D float64 [V]
        is known."""


class TableSplitter(Splitter):
    """Judges all ends of the nodes, and lets the refiner look them up: for any judge and refiner.

    Args:
        items: what is known of the nodes' heads and slots.
        evaluator: D of their ends.
        refiner: how nodes split.
    """

    def __init__(self, items: Items, evaluator: DistortionEvaluator, refiner: Refiner) -> None:
        self._items, self._evaluator, self._refiner = items, evaluator, refiner

    def roots(self, nodes: Nodes) -> Roots:
        groups = self._evaluated(nodes)
        distortion = torch.empty(len(nodes.item), dtype=torch.float64, device=nodes.item.device)
        drop = torch.empty_like(distortion)
        for rows, ends in groups:
            distortion[rows] = ends.suffix[:, 0].double()
            drop[rows] = ends.drop.double()

        def split(chosen: Tensor) -> Split:
            return self._refined(nodes[chosen], distortion[chosen], _restricted(groups, chosen))

        return Roots(distortion, drop, split)

    def __call__(self, nodes: Nodes, distortion: Tensor) -> Split:
        return self._refined(nodes, distortion, self._evaluated(nodes))

    def _evaluated(self, nodes: Nodes) -> list[tuple[Tensor, IntervalCosts]]:
        """Rows of similar length, and what is known of them."""
        return [(rows, self._evaluator(nodes[rows])) for rows in _by_length(nodes.length)]

    def _refined(
        self, nodes: Nodes, distortion: Tensor, groups: list[tuple[Tensor, IntervalCosts]]
    ) -> Split:
        """The refiner's children of nodes that were judged in groups of similar length."""
        counts, starts, ends, distortions = [], [], [], []
        for rows, judged in groups:
            table = CostTable(nodes[rows], self._items, judged, distortion[rows])
            children = self._refiner(table.nodes, table)
            row = torch.arange(len(rows), device=rows.device)
            row = torch.repeat_interleave(row, children.count)
            counts.append(children.count)
            starts.append(children.start)
            ends.append(children.end)
            distortions.append(table.of_children(row, children.start, children.end))
        if not counts:
            none = torch.empty(0, dtype=torch.int64, device=nodes.item.device)
            return Split(none, none, none, none.double())
        order = torch.cat([rows for rows, _ in groups])
        count = torch.zeros_like(nodes.item)
        count[order] = torch.cat(counts)
        # Back to the order of the nodes: sort the children by their parent's place.
        place = torch.repeat_interleave(order, torch.cat(counts)).argsort(stable=True)
        return Split(
            count, torch.cat(starts)[place], torch.cat(ends)[place], torch.cat(distortions)[place]
        )


def _by_length(length: Tensor) -> list[Tensor]:
    """Rows of similar length, ascending, an octave a group; all at once if they are few.

    Grids are as wide as the longest node; one long node must not widen many rows.
    """
    if not len(length):
        return []
    if len(length) * int(length.max()) < _FEW:
        return [torch.arange(len(length), device=length.device)]
    size = torch.ceil(torch.log2(length.float())).long()
    counts = torch.bincount(size)
    return list(size.argsort(stable=True).split(counts[counts > 0].tolist()))


def _restricted(
    groups: list[tuple[Tensor, IntervalCosts]], chosen: Tensor
) -> list[tuple[Tensor, IntervalCosts]]:
    """What is left of judged groups if only the nodes `chosen` (bool) go on."""
    place = chosen.cumsum(0) - 1
    found = []
    for rows, ends in groups:
        kept = torch.nonzero(chosen[rows]).flatten()
        if len(kept):
            found.append((place[rows[kept]], ends[kept]))
    return found
