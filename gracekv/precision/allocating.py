"""The interface of precisions that choose for each entry how many bits it takes."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate import BudgetPlan, Selection
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.cache.coded import Coding
from gracekv.precision.base import EXACT, Precision
from gracekv.prefill import CaptureInfo, LayerCapture, PromptSpans, Region


class AllocatingPrecision(Precision):
    """Chooses the width of each entry, or drops it, if the budget counts bytes.

    With a budget in entries, all entries stay as they are.
    """

    @property
    @abc.abstractmethod
    def stored(self) -> tuple[Precision, ...]:
        """The precisions that `allocate` chooses from, one for each width, the narrowest first."""

    @property
    def codings(self) -> tuple[Coding, ...]:
        return tuple(coding for width in self.stored[::-1] for coding in width.codings)

    def entry_bytes(self, dim: int, itemsize: int, spans: PromptSpans) -> EntryBytes | None:
        """The least bytes of entries, at the narrowest width."""
        return self.stored[0].entry_bytes(dim, itemsize, spans)

    def widths(self, start: Tensor, region: Region) -> Tensor:
        return torch.full_like(start, EXACT, dtype=torch.uint8)

    def keeps_all(self, plan: BudgetPlan, entry_bytes: int) -> bool:
        return plan.keeps_all and (plan.compressible <= 0 or plan.holds(entry_bytes))

    def measured(self, capture: LayerCapture, region: Region) -> Any:
        """The measurements of one layer that `allocate` needs."""
        return None

    @abc.abstractmethod
    def allocate(
        self,
        info: CaptureInfo,
        measured: Sequence[Any],
        candidates: Selection,
        worth: Tensor,
        budget: int,
    ) -> Tensor:
        """uint8 [E]: bits of a number of each candidate, or 0 if it is dropped.

        Args:
            info: facts of the sequence.
            measured: the results of `measured`, layer by layer.
            candidates: the entries that would fit at the narrowest width.
            worth: float64 [E], the loss if a candidate is dropped.
            budget: bytes allowed for the candidates of all processes.
        """
