"""The interface of precisions: how many bits kept entries take, and how they are stored."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gracekv.allocate import BudgetPlan
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.cache.coded import CodedEntries, Coding
from gracekv.cache.entries import CompressedCache
from gracekv.cache.quantised import QuantisedEntries
from gracekv.precision.quantise import as_read, quantise
from gracekv.prefill import PromptSpans, Region
from gracekv.registry import Registry, Strategy

EXACT = 16
"""The width of entries that stay as they are, in the model's dtype, whatever that is."""


def _layer(layer: RaggedEntries, widths: Tensor, codings: Sequence[Coding]) -> QuantisedEntries:
    coded = tuple(_coded(layer.where(widths == coding.bits), coding) for coding in codings)
    return QuantisedEntries(layer.where(widths == EXACT), coded)


def _coded(part: RaggedEntries, coding: Coding) -> CodedEntries:
    keys, values = (
        quantise(numbers, part.lengths, coding, by)
        for numbers, by in ((part.keys, coding.keys), (part.values, coding.values))
    )
    index = (part.positions, part.log_multiplicity, part.offsets)
    return CodedEntries(keys, values, *index, coding, part.sequences)


class Precision(Strategy, abc.ABC):
    """Store the kept entries of the compressible region with fewer bits.

    Positions and multiplicities stay. Entries outside the region (prefix, recent window, question)
    stay bit for bit unless a strategy's fields say otherwise. Deterministic.
    All entries that fit are kept, unless it is an `AllocatingPrecision`.
    """

    @property
    def codings(self) -> tuple[Coding, ...]:
        """How entries of fewer bits are stored, one coding a width; none: they never are."""
        return ()

    def entry_bytes(self, dim: int, itemsize: int, spans: PromptSpans) -> EntryBytes | None:
        """What entries cost, if budgets count bytes; None: they count entries.

        Args:
            dim: d.
            itemsize: bytes of a number in the model's dtype.
            spans: of the prompt.

        Raises `ShapeError` if heads of dimension `dim` cannot be stored so.
        """
        return None

    @abc.abstractmethod
    def widths(self, start: Tensor, region: Region) -> Tensor:
        """uint8 [E]: bits of a number of each entry; `EXACT` is the model's dtype.

        Args:
            start: int64 [E], the first position that each entry stands for.
            region: the compressible positions; an empty one leaves everything as it is.
        """

    def keeps_all(self, plan: BudgetPlan, entry_bytes: int) -> bool:
        """Whether nothing need be dropped, nor shared out; `entry_bytes` is that of an entry."""
        return plan.keeps_all

    def keys_as_read(
        self, cache: RaggedCache, widths: Sequence[Tensor], dim: int | None = None
    ) -> RaggedCache:
        """`cache` with float32 keys [E, d] as decoding will read them: what values are fitted to.

        Args:
            cache: the packed cache of one sequence.
            widths: for each layer uint8 [E], of `widths`.
            dim: how many of a key's coordinates are stored, the others stay; None: all.

        Raises `NonFiniteError` if keys cannot be quantised.
        """
        if not self.codings:
            return cache
        layers = []
        for layer, own in zip(cache.layers, widths, strict=True):
            keys = layer.keys.to(torch.float32, copy=True)
            for coding in self.codings:
                mask = own == coding.bits
                part = layer.where(mask)
                keys[mask, :dim] = as_read(part.keys[:, :dim], part.lengths, coding, coding.keys)
            layers.append(dataclasses.replace(layer, keys=keys))
        return dataclasses.replace(cache, layers=tuple(layers))

    def __call__(self, cache: RaggedCache, widths: Sequence[Tensor]) -> CompressedCache:
        """Store every entry at its width.

        Args:
            cache: the packed and fitted cache of one sequence.
            widths: for each layer uint8 [E], of `widths`.

        Raises `NonFiniteError` if numbers cannot be quantised.
        """
        if not self.codings:
            return cache
        pairs = zip(cache.layers, widths, strict=True)
        layers = tuple(_layer(*pair, self.codings) for pair in pairs)
        return CompressedCache(layers, cache.length, cache.padding)


PRECISIONS = Registry("precision", "how many bits the numbers of an entry take", Precision)
