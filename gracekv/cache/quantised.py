"""`QuantisedEntries`, a layer with quantised and exact entries; batches of layers for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.cache.coded import CodedEntries, Coding, by_coding
from gracekv.cache.entries import CompressedCache, LayerEntries
from gracekv.errors import ShapeError
from gracekv.kernels import ragged
from gracekv.kernels.linalg import rounded

# Entries that are dequantised at once, which bounds the additional memory. Ours.
_STEP = 2**14


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedEntries(LayerEntries):
    """One layer: some entries in the model's dtype, the others as codes.

    Each entry of a head is in one part, sorted by position; attention does not depend on the order.

    Attributes:
        exact: entries in the model's dtype: prefix, recent window, question.
        coded: quantised entries, the widest first: one part per width or, if a context was
            extended, per width of each passage, which has its own blocks.

    Raises `ShapeError` if the parts differ in heads, sequences or dimension, or are not in order.
    """

    exact: RaggedEntries
    coded: tuple[CodedEntries, ...]

    def __post_init__(self) -> None:
        shapes = {(len(part.lengths), part.sequences, part.dim) for part in self.parts}
        if len(shapes) != 1:
            raise ShapeError(
                f"The exact and coded parts of a layer must agree in rows, sequences and head "
                f"dimension; got {sorted(shapes)}."
            )
        bits = [coding.bits for coding in self.codings]
        if not bits or bits != sorted(bits, reverse=True):
            raise ShapeError(f"Coded parts of a layer must come widest first; got {bits} bits.")

    @property
    def parts(self) -> tuple[RaggedEntries | CodedEntries, ...]:
        """All parts, the exact one first."""
        return (self.exact, *self.coded)

    @property
    def sequences(self) -> int:  # type: ignore[override]
        """S."""
        return self.exact.sequences

    def head(self, g: int, sequence: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys and values float32 [E_g, d], positions [E_g] and log m [E_g], by position."""
        row = sequence * self.heads + g
        return self.rows(row, row + 1).dequantised().head(0)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> RaggedEntries:
        """All entries, with keys and values [E, d] in `dtype`."""
        order, at = self._order()[2], self.exact.entries
        place = order.argsort().to(self.device)
        keys, values = (self.exact.keys.new_empty(len(order), self.dim, dtype=dtype) for _ in "kv")
        keys[place[:at]] = self.exact.keys.to(dtype)
        values[place[:at]] = self.exact.values.to(dtype)
        for part in map(CodedEntries.stack, by_coding(self.coded)):
            for first in range(0, part.entries, _STEP):
                numbers = part.numbers(first, min(first + _STEP, part.entries))
                where = place[at : at + len(numbers[0])]
                keys[where], values[where] = (rounded(x, dtype) for x in numbers)
                at += len(where)
        order = order.to(self.device)
        positions = torch.cat([part.positions for part in self.parts])[order]
        log_m = torch.cat([part.log_multiplicity for part in self.parts])[order]
        offsets = ragged.offsets(self.lengths)
        return RaggedEntries(keys, values, positions, log_m, offsets, self.sequences)

    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row int64 [E], position int64 [E] and log m float32 [E] of all entries, on the CPU."""
        row, position, order = self._order()
        log_m = torch.cat([part.log_multiplicity for part in self.parts]).cpu()
        return row[order], position[order], log_m[order]

    def bits(self) -> Tensor:
        """Bits per number of each entry, int64 [E] on the CPU, in the order of `index`."""
        coded = (torch.full((x.entries,), x.coding.bits, device="cpu") for x in self.coded)
        return torch.cat([self.exact.bits(), *coded])[self._order()[2]]

    def _order(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row and position int64 [E] of each entry, part after part, and the order by both."""
        lengths = torch.cat([part.lengths for part in self.parts])
        row = ragged.rows(lengths) % (len(self.exact.offsets) - 1)
        position = torch.cat([part.positions for part in self.parts]).cpu().long()
        last = int(position.max()) + 1 if len(position) else 1
        return row, position, (row * last + position).argsort()

    def rows(self, begin: int, end: int) -> QuantisedEntries:
        """Views of rows [begin, end), as one sequence."""
        coded = tuple(part.rows(begin, end) for part in self.coded)
        return QuantisedEntries(self.exact.rows(begin, end), coded)

    def widths(self) -> Mapping[int, tuple[int, int]]:
        """Entries and bytes of keys and values by bits per number."""
        widths = dict(self.exact.widths())
        for part in self.coded:
            entries, size = widths.get(part.coding.bits, (0, 0))
            widths[part.coding.bits] = (entries + part.entries, size + part.kv_bytes)
        return widths

    def tensors(self) -> Mapping[str, Tensor]:
        """All stored tensors by name: [E, d] exact keys, "coded.keys.codes" [E, bytes], ...

        `coded_prefixes` names the parts if there are several.
        """
        named = dict(self.exact.tensors())
        for prefix, part in zip(coded_prefixes(self.codings), self.coded, strict=True):
            named |= {f"{prefix}{name}": tensor for name, tensor in part.tensors().items()}
        return named

    def mapped(self, change: Callable[[Tensor], Tensor]) -> QuantisedEntries:
        """The same entries with `change` applied to each tensor [...] except offsets, in order."""
        exact = self.exact.mapped(change)
        return QuantisedEntries(exact, tuple(part.mapped(change) for part in self.coded))

    @classmethod
    def stack(cls, layers: Sequence[QuantisedEntries]) -> QuantisedEntries:
        """Join the sequences of all `layers`, which must agree in heads, dimension and codings.

        Raises `ShapeError` if they do not.
        """
        if len(codings := {layer.codings for layer in layers}) != 1:
            raise ShapeError(
                f"Only layers of equal codings can be stacked; got {sorted(map(str, codings))}. "
                f"Compress all prompts with one pipeline."
            )
        exact = RaggedEntries.stack([layer.exact for layer in layers])
        parts = zip(*(layer.coded for layer in layers), strict=True)
        return cls(exact, tuple(CodedEntries.stack(part) for part in parts))


def coded_prefixes(codings: Sequence[Coding]) -> list[str]:
    """The prefixes of the tensor names of each coded part.

    "coded." if it is the only one; "coded.8.", "coded.4." for several widths; "coded.0.",
    "coded.1." and so on if two parts have the same width.
    """
    if len(codings) == 1:
        return ["coded."]
    names = [coding.bits for coding in codings]
    if len(set(names)) < len(names):
        names = list(range(len(codings)))
    return [f"coded.{name}." for name in names]


def dequantised(cache: CompressedCache) -> RaggedCache:
    """`cache` with all entries in the model's dtype; layers without codes are not copied.

    For readers that do not support codes. Takes the memory that codes save. Source: ours.
    """
    layers = tuple(layer.dequantised(layer.dtype) for layer in cache.layers)
    return RaggedCache(layers, cache.length, cache.padding, cache.other_layers)


Entries = TypeVar("Entries", RaggedEntries, QuantisedEntries)


def batches(
    layers: Sequence[RaggedEntries], size: Callable[[RaggedEntries], int], limit: int
) -> Iterator[slice]:
    """Consecutive layers on one device whose number times the largest `size` is within `limit`.

    On the CPU each layer is its own batch, which stays in the processor's cache.
    """
    first, largest = 0, 0
    for number, layer in enumerate(layers):
        largest = max(largest, size(layer))
        alone = layer.device.type == "cpu" or layer.device != layers[first].device
        if number > first and (alone or (number + 1 - first) * largest > limit):
            yield slice(first, number)
            first, largest = number, size(layer)
    yield slice(first, len(layers))


def apart(batch: Entries, layers: int) -> list[Entries]:
    """The layers of a batch, each one a sequence of it, as copies."""
    if layers == 1:
        return [batch]
    views = [batch.sequence(number) for number in range(layers)]
    tensors = [item for view in views for item in view.tensors().items()]
    made = iter(copied([x for name, x in tensors if "offsets" not in name]))
    return [view.mapped(lambda _: next(made)) for view in views]


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of `tensors` [...]; on a GPU one kernel copies many of one dtype."""
    copies = list(map(torch.empty_like, tensors))
    for dtype in {x.dtype for x in tensors}:
        same = [n for n, x in enumerate(tensors) if x.dtype == dtype]
        torch._foreach_copy_([copies[n] for n in same], [tensors[n] for n in same])
    return copies
