"""The interface of precisions, which choose the bit width of kept entries and store them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gracekv.allocate import BudgetPlan, Selection
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.cache.coded import Coding
from gracekv.cache.entries import CompressedCache
from gracekv.cache.quantised import QuantisedEntries, apart, batches
from gracekv.errors import ConfigError
from gracekv.kernels import ragged
from gracekv.kernels.uploads import upload_all
from gracekv.precision.quantise import blocks_of, check_finite, coded, quantised
from gracekv.prefill import CaptureInfo, LayerCapture, PromptSpans, Region
from gracekv.registry import Registry, Strategy

EXACT = 16
"""The width that stands for the model's dtype."""


# Bytes of keys that are quantised at once on a GPU.
_BATCH = 256 * 2**20


class Precision(Strategy, abc.ABC):
    """Store the kept entries of the compressible region with fewer bits.

    Positions and multiplicities do not change. Entries outside the region (prefix, recent window,
    question) stay bitwise equal unless a strategy's fields say otherwise. Deterministic. All
    entries that fit are kept, except by an `AllocatingPrecision`.
    """

    @property
    def codings(self) -> tuple[Coding, ...]:
        """How quantised entries are stored, one coding per width; () if none ever is."""
        return ()

    def entry_bytes(self, dim: int, itemsize: int, spans: PromptSpans) -> EntryBytes | None:
        """The cost of entries if budgets count bytes, or None if they count entries.

        Args:
            dim: d.
            itemsize: bytes of a number in the model's dtype.
            spans: the prompt's spans.

        Raises `ShapeError` if heads of dimension `dim` cannot be stored this way.
        """
        return None

    def asks(self, spans: PromptSpans) -> Tensor:
        """int64 [P] on the CPU: positions whose queries are read while layers are measured."""
        return torch.zeros(0, dtype=torch.int64)

    @abc.abstractmethod
    def widths(self, start: Tensor, region: Region) -> Tensor:
        """uint8 [E]: bits per number of each entry; `EXACT` stands for the model's dtype.

        Args:
            start: int64 [E], the first position that each entry stands for.
            region: the compressible positions; if empty, nothing is quantised.
        """

    def keeps_all(self, plan: BudgetPlan, entry_bytes: int) -> bool:
        """Whether everything fits unquantised, at `entry_bytes` per entry."""
        return plan.keeps_all

    def keys_as_read(
        self, cache: RaggedCache, widths: Sequence[Tensor], dim: int | None = None
    ) -> RaggedCache:
        """`cache` with float32 keys [E, d] as decoding will read them, for fitting values.

        Args:
            cache: the packed cache of one sequence.
            widths: for each layer uint8 [E], of `widths`.
            dim: how many coordinates of a key are quantised; the others do not change. By default
                all.

        Raises `NonFiniteError` if keys cannot be quantised.
        """
        if not self.codings:
            return cache
        layers, scales = list[RaggedEntries](), list[Tensor]()
        for batch, number, (_, *coded_parts) in self._batches(cache, widths):
            keys = batch.keys.to(torch.float32, copy=True)
            for part, coding in zip(coded_parts, self.codings, strict=True):
                at = part.entry[part.blocks]
                codes, scale, zero = quantised(batch.keys[at][..., :dim], -2, coding.most)
                keys[:, :dim].index_copy_(0, at.flatten(), (zero + scale * codes).flatten(0, 2))
                scales.append(scale)
            layers += apart(dataclasses.replace(batch, keys=keys), number)
        check_finite(scales, cache.layers[0].dtype)
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
        layers, scales = list[QuantisedEntries](), list[Tensor]()
        for batch, number, (exact, *coded_parts) in self._batches(cache, widths):
            pairs = zip(coded_parts, self.codings, strict=True)
            parts = [coded(batch.take(x.entry, x.offsets), x.blocks, spec) for x, spec in pairs]
            scales += [codes.scale for x in parts for codes in (x.keys, x.values)]
            plain = batch.take(exact.entry, exact.offsets)
            layers += apart(QuantisedEntries(plain, tuple(parts)), number)
        check_finite(scales, cache.layers[0].dtype)
        return CompressedCache(tuple(layers), cache.length, cache.padding)

    def _batches(
        self, cache: RaggedCache, widths: Sequence[Tensor]
    ) -> Iterator[tuple[RaggedEntries, int, list[_Part]]]:
        """Batches of stacked layers, their number, and their parts, the exact one first."""
        for some in batches(cache.layers, lambda layer: layer.keys.nbytes, _BATCH):
            batch = RaggedEntries.stack(cache.layers[some])
            own, parts = torch.cat(list(widths[some])).cpu(), []
            for bits, group in [(EXACT, 1), *((x.bits, x.group) for x in self.codings)]:
                mask = own == bits
                offsets = ragged.offsets(mask.long())[batch.offsets]
                parts.append(_Part(mask.nonzero()[:, 0], blocks_of(offsets.diff(), group), offsets))
            if sum(len(part.entry) for part in parts) != len(own):
                raise ConfigError(
                    f"{type(self).__name__} gives widths {own.unique().tolist()}; its codings have "
                    f"{[x.bits for x in self.codings]}, and {EXACT} stands for the model's dtype."
                )
            if batch.device.type != "cpu":
                tensors = iter(upload_all([x for part in parts for x in part[:2]], batch.device))
                parts = [_Part(next(tensors), next(tensors), part.offsets) for part in parts]
            yield batch, some.stop - some.start, parts


class AllocatingPrecision(Precision):
    """Chooses the width of each entry, or drops it, under a budget in bytes.

    With a budget in entries, all entries stay unquantised.
    """

    @property
    @abc.abstractmethod
    def stored(self) -> tuple[Precision, ...]:
        """The precisions that `allocate` chooses from, one for each width, the narrowest first."""

    @property
    def codings(self) -> tuple[Coding, ...]:
        return tuple(coding for width in self.stored[::-1] for coding in width.codings)

    def entry_bytes(self, dim: int, itemsize: int, spans: PromptSpans) -> EntryBytes | None:
        """The bytes of entries at the narrowest width."""
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
        """uint8 [E]: bits per number of each candidate, or 0 if it is dropped.

        Args:
            info: metadata of the sequence.
            measured: the results of `measured`, layer by layer.
            candidates: the entries that would fit at the narrowest width.
            worth: float64 [E], the loss if a candidate is dropped.
            budget: bytes allowed for the candidates of all processes.
        """


class _Part(NamedTuple):
    """The entries of one width in a batch of layers.

    Attributes:
        entry: int64 [n], their indices in the batch.
        blocks: int64 [N, size], see `blocks_of`.
        offsets: int64 [rows + 1] on the CPU, the start of each head's entries.
    """

    entry: Tensor
    blocks: Tensor
    offsets: Tensor


PRECISIONS = Registry("precision", "how many bits the numbers of an entry take", Precision)
