"""The interface of compressed caches, independent of how entries are stored."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gracekv.cache.coded import CodedEntries, Coding
from gracekv.errors import ShapeError, renamed
from gracekv.prefill.layer_state import LayerState


class LayerEntries(abc.ABC):
    """The entries of one layer, with its KV heads one after the other without padding.

    Several sequences (a batch of prompts) follow one another: head g of sequence s is row s * G +
    g. Each class stores keys and values in its own way.

    Attributes:
        sequences: S.
        exact: the entries that are not quantised, a `RaggedEntries`.
        coded: the quantised parts, the widest first; () if there are none.
    """

    __slots__ = ()

    sequences: int
    exact: Any
    coded: tuple[CodedEntries, ...]

    @property
    def heads(self) -> int:
        """G."""
        return (len(self.exact.offsets) - 1) // self.sequences

    @property
    def lengths(self) -> Tensor:
        """int64 [S*G] on the CPU, entries per row."""
        exact = self.exact.offsets.numpy()
        offsets = sum((part.offsets.numpy() for part in self.coded), start=exact)
        return torch.from_numpy(np.diff(offsets))

    @property
    def _keys(self) -> Tensor:
        keys: Tensor = self.exact.keys
        return keys

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype, which is that of queries."""
        return self._keys.dtype

    @property
    def device(self) -> torch.device:
        """The device of the entries."""
        return self._keys.device

    @property
    def dim(self) -> int:
        """d."""
        return self._keys.shape[1]

    @property
    def codings(self) -> tuple[Coding, ...]:
        """The codings of the quantised parts; () if there are none."""
        return tuple(part.coding for part in self.coded)

    @abc.abstractmethod
    def head(self, g: int, sequence: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys [E_g, d], values [E_g, d], positions [E_g] and log m [E_g] of head g, by position.

        Keys and values have the model's dtype if none is quantised, else float32.
        """

    @abc.abstractmethod
    def dequantised(self, dtype: torch.dtype = ...) -> Any:
        """All entries as `RaggedEntries`; in `dtype` (float32) if some are quantised."""

    @abc.abstractmethod
    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row int64 [E], position int64 [E] and log m float32 [E] of all entries, on the CPU.

        Row after row, by position.
        """

    @abc.abstractmethod
    def bits(self) -> Tensor:
        """Bits per number of each entry, int64 [E] on the CPU, in the order of `index`."""

    def sequence(self, s: int) -> Self:
        """Views of sequence s alone."""
        return self.rows(s * self.heads, (s + 1) * self.heads)

    @abc.abstractmethod
    def rows(self, begin: int, end: int) -> Self:
        """Views of rows [begin, end), as one sequence."""

    @abc.abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """All stored tensors by name: [E, d] keys, [E] positions and so on."""

    @abc.abstractmethod
    def widths(self) -> Mapping[int, tuple[int, int]]:
        """Entries and bytes of keys and values by bits per number."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, including scales and zero points."""
        return sum(size for _, size in self.widths().values())

    @property
    def metadata_bytes(self) -> int:
        """Bytes of positions, multiplicities and offsets."""
        return sum(t.nbytes for t in self.tensors().values()) - self.kv_bytes

    @classmethod
    @abc.abstractmethod
    def stack(cls, layers: Sequence[Any]) -> Self:
        """Join the sequences of all `layers`, which must agree in heads, dimension and dtype.

        Raises `ShapeError` if they do not.
        """


@dataclass(frozen=True, slots=True, eq=False)
class CompressedCache:
    """The packed cache of a sequence, or of several: immutable, shared by all continuations.

    Attributes:
        layers: L layers, each on its model layer's device.
        length: number of logical tokens covered, positions [0, length) of the longest sequence;
            decoding continues there. It is T - 1, since the last prompt token is fed again over the
            compressed cache (ours).
        padding: S numbers, how many tokens fewer each sequence covers; its prompt is left-padded by
            as many.
        other_layers: the states of the model's uncompressed layers, sequence by sequence.

    Raises:
        ShapeError: the layers do not match.
    """

    layers: tuple[LayerEntries, ...]
    length: int
    padding: tuple[int, ...] = (0,)
    other_layers: tuple[LayerState, ...] = ()

    kept = renamed("kept", "other_layers")

    def __post_init__(self) -> None:
        if {layer.sequences for layer in self.layers} != {len(self.padding)}:
            raise ShapeError(
                f"{type(self).__name__} takes layers of as many sequences as padding has numbers, "
                f"{len(self.padding)}; got {sorted({x.sequences for x in self.layers})}."
            )
        if min(self.padding) != 0 or max(self.padding) >= self.length:
            raise ShapeError(
                f"{type(self).__name__}.padding counts from the longest sequence: its minimum is "
                f"0, and all are below length = {self.length}; got {self.padding}."
            )

    @property
    def model_layers(self) -> tuple[int, ...]:
        """The number of each of `layers` in the model."""
        others = {state.number for state in self.other_layers if not state.beside_entries}
        every = range(len(self.layers) + len(others))
        return tuple(number for number in every if number not in others)

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.padding)

    def entries(self) -> Tensor:
        """int64 [L, S*G] physical entries, including prefix and suffix."""
        return torch.stack([layer.lengths for layer in self.layers])

    def unknown_scores(self) -> tuple[Tensor, ...]:
        """Scores of entries that no limit may drop: L tensors float32 [E] of inf, on the CPU."""
        sizes = self.entries().sum(1).tolist()
        return tuple(torch.full((x,), torch.inf, dtype=torch.float32, device="cpu") for x in sizes)

    def sequence(self, s: int) -> Self:
        """Views of sequence s alone; this cache if it has no other."""
        if self.sequences == 1:
            return self
        layers, length = tuple(x.sequence(s) for x in self.layers), self.length - self.padding[s]
        others = tuple(state.sequence(s, length) for state in self.other_layers)
        return type(self)(layers, length, other_layers=others)

    @classmethod
    def stack(cls, caches: Sequence[Self]) -> Self:
        """Join the sequences of all `caches` in one cache."""
        length = max(cache.length for cache in caches)
        layers = zip(*(cache.layers for cache in caches), strict=True)
        stacked = tuple(type(layer[0]).stack(layer) for layer in layers)
        padding = tuple(length - cache.length + pad for cache in caches for pad in cache.padding)
        others = map(LayerState.stack, zip(*(x.other_layers for x in caches), strict=True))
        return cls(stacked, length, padding, tuple(others))

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(layer.kv_bytes for layer in self.layers)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of all other packed tensors."""
        return sum(layer.metadata_bytes for layer in self.layers)
