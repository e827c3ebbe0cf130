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
    """Says which width each entry has, and which ones are dropped, where budgets come to bytes.

    A budget in entries leaves them all as they are.
    """

    @property
    @abc.abstractmethod
    def stored(self) -> tuple[Precision, ...]:
        """Precisions of one width each, the narrowest first, among which `allocate` chooses."""

    @property
    def codings(self) -> tuple[Coding, ...]:
        return tuple(coding for width in self.stored[::-1] for coding in width.codings)

    def entry_bytes(self, dim: int, itemsize: int, spans: PromptSpans) -> EntryBytes | None:
        """What entries cost at least, at the narrowest width."""
        return self.stored[0].entry_bytes(dim, itemsize, spans)

    def widths(self, start: Tensor, region: Region) -> Tensor:
        return torch.full_like(start, EXACT, dtype=torch.uint8)

    def keeps_all(self, plan: BudgetPlan, entry_bytes: int) -> bool:
        return plan.keeps_all and (plan.compressible <= 0 or plan.holds(entry_bytes))

    def measured(self, capture: LayerCapture, region: Region) -> Any:
        """What `allocate` needs of the tokens of one layer."""
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
        """uint8 [E]: bits of a number of each candidate, 0 where it is dropped.

        Args:
            info: facts of the sequence.
            measured: of each layer what `measured` gave.
            candidates: the entries that would fit at the least width.
            worth: float64 [E], what is lost where a candidate is dropped.
            budget: bytes that the candidates of all processes may take.
        """
