"""`uniform`: all entries of the region at one width."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

from gracekv import ragged
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.cache.base import RaggedCache, RaggedLayer
from gracekv.cache.coded import CodedEntries, Coding
from gracekv.cache.quantised import QuantisedCache, QuantisedLayer
from gracekv.hyperparameter import bounded
from gracekv.precision.base import PRECISIONS, Precision
from gracekv.precision.quantise import METADATA_BYTES, quantise
from gracekv.prefill import PromptSpans, Region


@final
@PRECISIONS.register("uniform")
@dataclass(frozen=True)
class UniformPrecision(Precision):
    """All entries of the region at 8 or 4 bits a number, in groups with a scale and a zero point.

    A number x of a group becomes the code round((x - zero) / scale), with the zero point at the
    group's least number and the scale its range over 2^bits - 1, both stored in 16 bits and
    rounded outwards: x is at most half a scale from what is read. Groups of equal numbers are
    exact. Ratios and bytes count codes, scales and zero points, against a full cache of 16-bit
    numbers.

    Source: asymmetric rounding to nearest, keys by channel and values by token, is KIVI's
    (arXiv:2402.02750). Ours: blocks inside ragged heads, the budget in bytes.

    Cost: two passes over the kept entries.

    Attributes:
        bits: of a code.
        group: numbers that share a scale and a zero point.
        keys: "channel": `group` consecutive entries of a head, channel by channel; "token": `group`
            consecutive channels of an entry.
        values: the same for values.
        sinks: the prompt's first tokens stay as they are (ours): models give them keys unlike all
            others, which would widen the range of their block.
    """

    bits: Literal[8, 4] = 8
    group: int = bounded(32, at_least=1)
    keys: Literal["channel", "token"] = "channel"
    values: Literal["channel", "token"] = "token"
    sinks: int = bounded(4, at_least=0)

    @property
    def coding(self) -> Coding:
        """How the codes are to be read."""
        return Coding(self.bits, self.group, self.keys, self.values)

    def entry_bytes(self, dim: int, itemsize: int, spans: PromptSpans) -> EntryBytes:
        """Bytes of codes, scales and zero points; raises `ShapeError` if the group does not fit."""
        self.coding.check(dim)
        by = (self.keys, self.values)
        pair = 2 * METADATA_BYTES
        return EntryBytes(
            exact=2 * dim * itemsize,
            coded=2 * dim * self.bits // 8
            + by.count("token") * (dim // min(self.group, dim)) * pair,
            block=by.count("channel") * dim * pair,
            per_block=self.group,
            full=2 * dim * 2,
            sinks=max(0, min(self.sinks, spans.context_end) - spans.context_start),
        )

    def __call__(
        self, cache: RaggedCache, starts: Iterable[Tensor], region: Region
    ) -> QuantisedCache:
        first = max(region.start, self.sinks)
        layers = tuple(
            self._layer(layer, (start >= first) & (start < region.end))
            for layer, start in zip(cache.layers, starts, strict=True)
        )
        return QuantisedCache(layers, cache.length, cache.padding)

    def _layer(self, layer: RaggedLayer, chosen: Tensor) -> QuantisedLayer:
        """`layer` with the entries `chosen` (bool [E]) quantised."""
        exact, coded = (_subset(layer, mask) for mask in (~chosen, chosen))
        keys, values = (
            quantise(numbers, coded.lengths, self.coding, by)
            for numbers, by in ((coded.keys, self.keys), (coded.values, self.values))
        )
        entries = CodedEntries(
            keys,
            values,
            coded.positions,
            coded.log_multiplicity,
            coded.offsets,
            self.coding,
            coded.sequences,
        )
        return QuantisedLayer(exact, entries)


def _subset(layer: RaggedLayer, mask: Tensor) -> RaggedLayer:
    """The entries of `layer` where `mask` (bool [E]) holds."""
    inside = ragged.offsets(mask.cpu().long())
    return RaggedLayer(
        layer.keys[mask],
        layer.values[mask],
        layer.positions[mask],
        layer.log_multiplicity[mask],
        inside[layer.offsets],
        layer.sequences,
    )
