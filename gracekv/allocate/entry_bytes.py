"""`EntryBytes`: how many bytes entries take."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gracekv.kernels import ragged


@dataclass(frozen=True, slots=True)
class EntryBytes:
    """How many bytes the keys and values of one head's entries take.

    Source: ours.

    Attributes:
        exact: bytes of an unquantised entry, in the model's dtype.
        coded: bytes of a quantised entry, with its own scales and zero points.
        block: bytes of the scales and zero points that a block of quantised entries shares.
        per_block: entries in a block; the last block of a head may have fewer.
        full: bytes of an entry of 16-bit numbers, in which ratios count whatever the model's dtype.
        sinks: how many of the context's first tokens are never quantised.
    """

    exact: int
    coded: int
    block: int
    per_block: int
    full: int
    sinks: int = 0

    def heads(self, exact: int, coded: Tensor) -> int:
        """Bytes of heads of `coded` quantised entries each, int64 [heads], and `exact` others."""
        blocks = int(ragged.blocks(coded, self.per_block).sum())
        return exact * self.exact + int(coded.sum()) * self.coded + blocks * self.block

    def most(self, size: int) -> int:
        """The most entries that fit into `size` bytes, all quantised and in full blocks."""
        return size * self.per_block // (self.coded * self.per_block + self.block)
