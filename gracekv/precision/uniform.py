"""`uniform`: all entries of the region at one width."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.cache.coded import Coding
from gracekv.precision.base import EXACT, PRECISIONS, Precision
from gracekv.precision.quantise import METADATA_BYTES
from gracekv.prefill import PromptSpans, Region
from gracekv.registry import bounded


@PRECISIONS.register("uniform", works_sharded=True)
class UniformPrecision(Precision):
    """All entries of the region at 8, 4 or 2 bits per number; groups share scale and zero point.

    A number x of a group becomes the code round((x - zero) / scale), with the zero point at the
    group's least number and the scale its range over 2^bits - 1, both stored in 16 bits and rounded
    outwards: the error is at most half a scale. Groups of equal numbers are exact. Ratios and bytes
    count codes, scales and zero points, relative to a full cache of 16-bit numbers.

    Source: asymmetric rounding to nearest, keys by channel and values by token, is KIVI's
    (arXiv:2402.02750). Ours: blocks inside ragged heads, the budget in bytes.

    Cost: two passes over the kept entries.

    Attributes:
        bits: width of a code.
        group: how many numbers share a scale and a zero point.
        keys: always "channel": a block of `group` consecutive entries of a head, channel by
            channel. The field remains for one release, for pipelines saved by version 0.2.
        values: always "token": `group` consecutive channels of an entry.
        sinks: how many of the prompt's first tokens stay unquantised (ours); their keys are unlike
            all others and would widen the range of their block.
    """

    bits: Literal[8, 4, 2] = 8
    group: int = bounded(32, at_least=1)
    keys: Literal["channel"] = "channel"
    values: Literal["token"] = "token"
    sinks: int = bounded(4, at_least=0)

    @property
    def codings(self) -> tuple[Coding]:
        return (Coding(self.bits, self.group),)

    def entry_bytes(self, dim: int, itemsize: int, spans: PromptSpans) -> EntryBytes:
        """Bytes of codes, scales and zero points; raises `ShapeError` if the group does not fit."""
        self.codings[0].check(dim)
        pair = 2 * METADATA_BYTES
        return EntryBytes(
            exact=2 * dim * itemsize,
            coded=2 * dim * self.bits // 8 + dim // min(self.group, dim) * pair,
            block=dim * pair,
            per_block=self.group,
            full=2 * dim * 2,
            sinks=max(0, min(self.sinks, spans.context_end) - spans.context_start),
        )

    def widths(self, start: Tensor, region: Region) -> Tensor:
        chosen = (start >= max(region.start, self.sinks)) & (start < region.end)
        return torch.where(chosen, self.bits, EXACT).to(torch.uint8)
