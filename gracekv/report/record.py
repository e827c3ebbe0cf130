"""`ReportRecord`: what a report shows of a run, so that the run itself can be released."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gracekv.allocate import Selection
from gracekv.report.auction import AuctionCurve
from gracekv.report.relevance import CodedRelevance


@dataclass(frozen=True, slots=True, eq=False)
class ReportRecord:
    """What the stages of one run made, compactly; tensors on the CPU.

    Attributes:
        region: first compressible position, and the one after the last.
        selection: the entries that stay; None if they are single tokens of no tree, which the
            cache's own positions say.
        slots: int32 [J + 1] absolute slot borders; None if every token is a slot.
        relevance: of the compressible tokens.
        curve: utility over entries spent.
        value_change: uint8 [E] of all packed entries, as in `Run`; None if nothing was fitted.
    """

    region: tuple[int, int]
    selection: Selection | None
    slots: Tensor | None
    relevance: CodedRelevance
    curve: AuctionCurve
    value_change: Tensor | None = None
