"""`EntryBytes`: what entries cost."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gracekv.kernels import ragged


@dataclass(frozen=True, slots=True)
class EntryBytes:
    """Bytes of keys and values of the entries of one head.

    Source: ours.

    Attributes:
        exact: of an entry as it is, in the model's dtype.
        coded: of a quantised entry, with the scales and zero points of its own.
        block: of the scales and zero points that a block of quantised entries shares.
        per_block: entries of a block; the last block of a head may have fewer.
        full: of an entry of 16-bit numbers, by which ratios count whatever the model's dtype.
        sinks: how many of the context's first tokens stay as they are where they are kept.
    """

    exact: int
    coded: int
    block: int
    per_block: int
    full: int
    sinks: int = 0

    def heads(self, exact: int, coded: Tensor) -> int:
        """Bytes of heads with `coded` quantised entries (int64 [heads]), `exact` ones in all."""
        blocks = int(ragged.blocks(coded, self.per_block).sum())
        return exact * self.exact + int(coded.sum()) * self.coded + blocks * self.block

    def most(self, size: int) -> int:
        """Entries that `size` bytes hold at most, all quantised and in full blocks."""
        return size * self.per_block // (self.coded * self.per_block + self.block)
