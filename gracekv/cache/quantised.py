"""`QuantisedCache`: a cache most of whose entries are quantised, beside some that are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv import ragged
from gracekv.cache.base import RaggedCache, RaggedLayer
from gracekv.cache.coded import CodedEntries, Coding
from gracekv.cache.entries import CompressedCache, LayerEntries
from gracekv.errors import ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedLayer(LayerEntries):
    """One layer: some entries in the model's dtype, the others as codes.

    A head's entries are in one part or the other, each by position; attention is the same in any
    order.

    Attributes:
        exact: entries as they are: prefix, recent window, question.
        coded: quantised entries.

    Raises `ShapeError` if the parts differ in heads, sequences or dimension.
    """

    exact: RaggedLayer
    coded: CodedEntries

    def __post_init__(self) -> None:
        shapes = {
            (len(part.lengths), part.sequences, part.dim) for part in (self.exact, self.coded)
        }
        if len(shapes) != 1:
            raise ShapeError(
                f"The exact and the coded part of a layer must agree in rows, sequences and head "
                f"dimension; got {sorted(shapes)}."
            )

    @property
    def sequences(self) -> int:  # type: ignore[override]
        """S."""
        return self.exact.sequences

    @property
    def heads(self) -> int:
        """G."""
        return self.exact.heads

    @property
    def lengths(self) -> Tensor:
        """int64 [S*G], entries per row."""
        return self.exact.lengths + self.coded.lengths

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.exact.dtype

    @property
    def device(self) -> torch.device:
        """Where the entries lie."""
        return self.exact.device

    @property
    def dim(self) -> int:
        """d."""
        return self.exact.dim

    @property
    def coding(self) -> Coding:
        """How quantised entries are to be read."""
        return self.coded.coding

    def head(self, g: int, sequence: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys and values float32 [E_g, d], positions [E_g] and log m [E_g], by position."""
        row = sequence * self.heads + g
        first, stop = int(self.coded.offsets[row]), int(self.coded.offsets[row + 1])
        keys, values, positions, log_m = self.exact.head(g, sequence)
        coded_keys, coded_values = self.coded.numbers(row, first, stop)
        positions = torch.cat([positions, self.coded.positions[first:stop]])
        order = positions.argsort()
        return (
            torch.cat([keys.float(), coded_keys])[order],
            torch.cat([values.float(), coded_values])[order],
            positions[order],
            torch.cat([log_m, self.coded.log_multiplicity[first:stop]])[order],
        )

    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row int64 [E], position int64 [E] and log m float32 [E] of all entries, on the CPU."""
        parts = (self.exact, self.coded)
        row = torch.cat([ragged.rows(part.lengths) for part in parts])
        position = torch.cat([part.positions for part in parts]).cpu().long()
        log_m = torch.cat([part.log_multiplicity for part in parts]).cpu()
        last = int(position.max()) + 1 if len(position) else 1
        order = (row * last + position).argsort()
        return row[order], position[order], log_m[order]

    def sequence(self, s: int) -> QuantisedLayer:
        """Views of sequence s alone."""
        rows = self.coded.rows(s * self.heads, (s + 1) * self.heads, sequences=1)
        return QuantisedLayer(self.exact.sequence(s), rows)

    def widths(self) -> Mapping[int, tuple[int, int]]:
        """Entries and bytes of keys and values by the bits of a number."""
        coded = {self.coding.bits: (self.coded.entries, self.coded.kv_bytes)}
        return {**self.exact.widths(), **coded}

    def tensors(self) -> Mapping[str, Tensor]:
        """All that is stored, by name: [E, d] exact keys, "coded.keys.codes" [E, bytes], ..."""
        coded = {f"coded.{name}": tensor for name, tensor in self.coded.tensors().items()}
        return {**self.exact.tensors(), **coded}

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values; of quantised ones with their scales and zero points."""
        return self.exact.kv_bytes + self.coded.kv_bytes

    @classmethod
    def stack(cls, layers: Sequence[QuantisedLayer]) -> QuantisedLayer:
        """The sequences of all `layers` in one; they must agree in heads, dimension and coding.

        Raises `ShapeError` if they do not.
        """
        exact = RaggedLayer.stack([layer.exact for layer in layers])
        return cls(exact, CodedEntries.stack([layer.coded for layer in layers]))


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedCache(CompressedCache):
    """A cache of quantised layers.

    Attributes:
        layers: L layers.
        length: logical tokens covered.
        padding: S numbers.

    See `CompressedCache`.
    """

    layers: tuple[QuantisedLayer, ...]


def dequantised(cache: CompressedCache) -> RaggedCache:
    """`cache` with all entries in the model's dtype; layers without quantised entries as they are.

    For what reads no codes; takes the memory that they save. Source: ours.
    """
    layers = []
    for layer in cache.layers:
        if isinstance(layer, RaggedLayer):
            layers.append(layer)
            continue
        heads = [layer.head(g, s) for s in range(layer.sequences) for g in range(layer.heads)]
        keys, values, positions, log_m = (torch.cat(part) for part in zip(*heads, strict=True))
        offsets = ragged.offsets(layer.lengths)
        numbers = (keys.to(layer.dtype), values.to(layer.dtype))
        layers.append(RaggedLayer(*numbers, positions, log_m, offsets, layer.sequences))
    return RaggedCache(tuple(layers), cache.length, cache.padding)
