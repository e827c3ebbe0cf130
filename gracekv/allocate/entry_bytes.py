"""`EntryBytes`: how many bytes the entries of a head take."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gracekv.kernels import ragged


@dataclass(frozen=True, slots=True)
class EntryBytes:
    """Sizes in bytes of the keys and values of one head's entries.

    Source: ours.

    Attributes:
        exact: bytes of an unquantised entry, in the model's dtype.
        coded: bytes of a quantised entry, including its own scales and zero points.
        block: bytes of the scales and zero points shared by a block of quantised entries.
        per_block: entries in a block; the last block of a head may have fewer.
        full: bytes of an entry in 16-bit numbers, the reference of ratios in any model dtype.
        sinks: how many of the context's first tokens are never quantised.
    """

    exact: int
    coded: int
    block: int
    per_block: int
    full: int
    sinks: int = 0

    def heads(self, exact: int, coded: Tensor) -> int:
        """Bytes of heads with `coded` quantised entries each, int64 [heads], and `exact` others."""
        blocks = int(ragged.blocks(coded, self.per_block).sum())
        return exact * self.exact + int(coded.sum()) * self.coded + blocks * self.block

    def most(self, size: int) -> int:
        """The maximum number of entries in `size` bytes, all quantised and in full blocks."""
        return size * self.per_block // (self.coded * self.per_block + self.block)
