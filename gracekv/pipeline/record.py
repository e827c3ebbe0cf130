"""`RunRecord`: what stays of a run whose stages' results are released."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.allocate import Frontier, Selection
from gracekv.allocate.curve import AuctionCurve, auction_curve
from gracekv.cache import CompressedCache
from gracekv.segment import Partition
from gracekv.value import Relevance
from gracekv.value.coded import CodedRelevance


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    """The scores and the selection of one run, compactly; tensors on the CPU.

    A limit's first cut ranks the packed entries by these scores, and `gracekv.report` shows them.

    Attributes:
        region: first compressible position, and the one after the last.
        selection: the entries that stay; None if they are single tokens of no tree, whose positions
            are the cache's own.
        slots: int32 [J + 1] absolute slot borders; None if every token is a slot.
        relevance: of the compressible tokens.
        curve: utility over entries spent.
    """

    region: tuple[int, int]
    selection: Selection | None
    slots: Tensor | None
    relevance: CodedRelevance
    curve: AuctionCurve

    @classmethod
    def of(
        cls,
        partition: Partition,
        relevance: Relevance,
        selection: Selection,
        floor: Frontier | None,
        frontier: Frontier | None,
        elastic: bool,
    ) -> RunRecord:
        """The record of a run; arguments are named as in `gracekv.pipeline.run.Run`."""
        whole = partition.slots == partition.region.length
        prices = relevance.scores, relevance.sensitivity
        return cls(
            region=selection.region,
            selection=None if selection.end is None else selection.cpu(),
            slots=None if whole else partition.bounds.to("cpu", torch.int32),
            relevance=CodedRelevance.of(relevance.scores),
            curve=auction_curve(selection, *prices, floor, frontier, elastic),
        )

    def entry_scores(self, cache: CompressedCache) -> tuple[Tensor, ...]:
        """L tensors float32 [E]: the relevance of the token of each entry of the run's `cache`.

        inf for entries outside `region`.
        """
        first, last = self.region
        scores = self.relevance.decoded() * self.relevance.mean[..., None]
        found = []
        for own, layer in zip(scores, cache.layers, strict=True):
            row, position, _ = layer.index()
            inside = (position >= first) & (position < last)
            found.append(torch.full(row.shape, torch.inf, dtype=torch.float32))
            found[-1][inside] = own[row[inside], position[inside] - first]
        return tuple(found)
