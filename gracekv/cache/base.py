"""`RaggedCache`: the compressed cache as physical tensors, and the interface of packers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from torch import Tensor

from gracekv.allocate.selection import LayerLayout, Selection
from gracekv.cache.coded import CodedEntries
from gracekv.cache.entries import CompressedCache, LayerEntries
from gracekv.errors import ShapeError
from gracekv.kernels import ragged
from gracekv.prefill import LayerCapture, Prefill, PrefillReader
from gracekv.registry import Registry, Strategy
from gracekv.tree.merge import PrototypeRule

PARTS = ("keys", "values", "positions", "log_multiplicity", "offsets")
"""The tensors of a `RaggedEntries`."""


@dataclass(frozen=True, slots=True, eq=False)
class RaggedEntries(LayerEntries):
    """The entries of one layer, in the model's dtype.

    Attributes:
        keys: [E, d] post-RoPE, in the model's dtype.
        values: [E, d].
        positions: int32 [E], absolute in their sequence, ascending within a head.
        log_multiplicity: float32 [E], added to the attention logit; 0 for original tokens.
        offsets: int64 [S*G+1] on the CPU; row r holds entries [offsets[r], offsets[r+1]).
        sequences: S.
        scores: bfloat16 [E], used by limits; inf for entries that must stay; None if unknown.

    Raises:
        ShapeError: the tensors' shapes do not match.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    log_multiplicity: Tensor
    offsets: Tensor
    sequences: int = 1
    scores: Tensor | None = None

    def __post_init__(self) -> None:
        entries = int(self.offsets.numpy()[-1])
        if self.keys.ndim != 2 or self.keys.shape != self.values.shape or len(self.keys) != entries:
            raise ShapeError(
                f"RaggedEntries takes keys and values [E, d] with E = offsets[-1] = {entries}; got "
                f"{list(self.keys.shape)} and {list(self.values.shape)}."
            )
        if self.scores is not None and self.scores.shape != (entries,):
            raise ShapeError(f"RaggedEntries takes scores [{entries}]; got {self.scores.shape}.")
        if self.positions.shape != (entries,) or self.log_multiplicity.shape != (entries,):
            raise ShapeError(
                f"RaggedEntries takes positions and log_multiplicity [{entries}]; got "
                f"{list(self.positions.shape)} and {list(self.log_multiplicity.shape)}."
            )
        if self.sequences < 1 or (len(self.offsets) - 1) % self.sequences:
            raise ShapeError(
                f"RaggedEntries takes offsets [S*G+1] of S sequences with G heads each; got "
                f"{len(self.offsets) - 1} rows for {self.sequences} sequences."
            )

    @property
    def exact(self) -> RaggedEntries:
        """The entries that are not quantised: all of them."""
        return self

    @property
    def coded(self) -> tuple[CodedEntries, ...]:  # type: ignore[override]
        """Quantised parts: none."""
        return ()

    @property
    def entries(self) -> int:
        """E, number of physical entries over all heads and sequences."""
        return len(self.keys)

    def head(self, g: int, sequence: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of head g: keys [E_g, d], values [E_g, d], positions [E_g], log m [E_g]."""
        row = sequence * self.heads + g
        at = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        return self.keys[at], self.values[at], self.positions[at], self.log_multiplicity[at]

    def dequantised(self, dtype: torch.dtype = torch.float32) -> RaggedEntries:
        """These entries, none of which is quantised."""
        return self

    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row int64 [E], position int64 [E] and log m float32 [E] of all entries, on the CPU."""
        return ragged.rows(self.lengths), self.positions.cpu().long(), self.log_multiplicity.cpu()

    def bits(self) -> Tensor:
        """Bits per number of each entry, int64 [E] on the CPU: all alike."""
        return torch.full((self.entries,), 8 * self.keys.element_size(), device="cpu")

    def rows(self, begin: int, end: int) -> RaggedEntries:
        """Views of rows [begin, end), as one sequence."""
        offsets = self.offsets.numpy()[begin : end + 1]
        at = slice(int(offsets[0]), int(offsets[-1]))
        parts = {name: x[at] for name, x in self.columns().items()}
        return RaggedEntries(**parts, offsets=torch.from_numpy(offsets - at.start), sequences=1)

    def where(self, mask: Tensor) -> RaggedEntries:
        """The entries where `mask` (bool [E]) is True."""
        mask = mask.cpu()
        entry = mask.nonzero()[:, 0].to(self.device)
        return self.take(entry, ragged.offsets(mask.long())[self.offsets])

    def take(self, entry: Tensor, offsets: Tensor) -> RaggedEntries:
        """The entries at indices `entry` (int64 [n]), in rows with these `offsets`."""
        # Four times as fast as a mask, which would be scanned for each tensor.
        parts = {name: x.index_select(0, entry) for name, x in self.columns().items()}
        return replace(self, **parts, offsets=offsets)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> RaggedEntries:
        """The same entries with `change` applied to each tensor [...] except offsets, in order."""
        changed: dict[str, Any] = {name: change(x) for name, x in self.columns().items()}
        return replace(self, **changed)

    def widths(self) -> Mapping[int, tuple[int, int]]:
        """Entries and bytes of keys and values by bits per number: a single width."""
        return {8 * self.keys.element_size(): (self.entries, 2 * self.keys.nbytes)}

    def tensors(self) -> Mapping[str, Tensor]:
        """All stored tensors by name: [E, d] keys, [E] positions and so on."""
        return {**self.columns(), "offsets": self.offsets}

    def columns(self) -> dict[str, Any]:
        """The tensors [E, ...] by name: all but the offsets."""
        found = {name: getattr(self, name) for name in PARTS[:-1]}
        return found if self.scores is None else {**found, "scores": self.scores}

    @classmethod
    def dense(cls, keys: Tensor, values: Tensor, first: int = 0) -> RaggedEntries:
        """Every token of keys and values [G, T, d], unchanged (FullKV); the first is at `first`."""
        heads, length, _ = keys.shape
        positions = torch.arange(first, first + length, dtype=torch.int32, device=keys.device)
        keys, values = (rearrange(x, "g t d -> (g t) d") for x in (keys, values))
        positions = positions.repeat(heads)
        log_m = torch.zeros(heads * length, device=keys.device, dtype=torch.float32)
        return cls(keys, values, positions, log_m, torch.arange(heads + 1) * length)

    @classmethod
    def stack(cls, layers: Sequence[RaggedEntries]) -> RaggedEntries:
        """Join the sequences of all `layers`, which must agree in heads, dimension and dtype.

        Raises `ShapeError` if they do not.
        """
        if len(kinds := {(x.heads, x.dim, x.dtype, x.device) for x in layers}) != 1:
            raise ShapeError(
                f"Only layers with the same heads, dimension, dtype and device can be stacked; got "
                f"{sorted(map(str, kinds)) or 'none'}. Compress all prompts with one model."
            )
        if len(layers) == 1:
            return layers[0]
        columns = [x.columns() for x in layers]
        # Scores only if all layers have them.
        joined = {name: torch.cat([x[name] for x in columns]) for name in min(columns, key=len)}
        offsets = ragged.offsets(torch.cat([x.lengths for x in layers]))
        return cls(**joined, offsets=offsets, sequences=sum(x.sequences for x in layers))


@dataclass(frozen=True, slots=True, eq=False)
class RaggedCache(CompressedCache):
    """A cache whose entries all have the model's dtype.

    Attributes:
        layers: L layers.
        length: logical tokens covered.
        padding: S integers.

    See `CompressedCache`.
    """

    layers: tuple[RaggedEntries, ...]

    @property
    def scores(self) -> list[Tensor] | None:
        """bfloat16 [E] for each layer; None if unknown."""
        found = [x.scores for x in self.layers if x.scores is not None]
        return found if len(found) == len(self.layers) else None

    def with_scores(self, scores: Sequence[Tensor] | None) -> RaggedCache:
        """This cache with scores [E] for each layer, or without scores."""
        layers = tuple(
            replace(x, scores=scores[n].to(x.device, torch.bfloat16) if scores else None)
            for n, x in enumerate(self.layers)
        )
        return replace(self, layers=layers)

    def with_keys_of(self, other: RaggedCache, read: RaggedCache, dim: int) -> RaggedCache:
        """This cache with the keys of `other`, changed like its own keys since `read`.

        All have the same entries. Keys and values keep their first `dim` coordinates.
        """
        layers = []
        for layer, x, old in zip(self.layers, other.layers, read.layers, strict=True):
            moves = layer.keys is not old.keys
            keys = (x.keys + (layer.keys - old.keys)).to(x.dtype) if moves else x.keys
            layers.append(replace(layer, keys=keys[:, :dim], values=layer.values[:, :dim]))
        return replace(self, layers=tuple(layers))


@dataclass(frozen=True, slots=True, eq=False)
class LayerToPack:
    """The arguments of a packer for one layer.

    Attributes:
        capture: the layer.
        layout: the token interval of each entry that stays.
        scores: R^tok [G, N], the weights of merged values.
        rule: how the tokens of one node merge.
    """

    capture: LayerCapture
    layout: LayerLayout
    scores: Tensor
    rule: PrototypeRule


class Packer(PrefillReader, Strategy, abc.ABC):
    """Turn the chosen nodes into physical entries.

    Each head holds, in this order: the prefix, the kept nodes by start, the recent window, the
    suffix without the last prompt token. Prefix and suffix are the prefill's own keys and values,
    bit for bit; so are the recent window and singletons, unless the packer merges dropped tokens
    into them.

    Attributes:
        represents: the tokens that an entry of the region stands for: "node", all tokens of its
            node; "token", one of them, with the others dropped; "mixture", one token and parts of
            any dropped tokens.
        by_entry: whether an entry depends only on its own interval, so other entries can be dropped
            later. Where nothing is merged, single tokens are then stored as they are, without
            `layer`.
    """

    by_entry: ClassVar[bool] = False
    represents: ClassVar[Literal["node", "token", "mixture"]] = "node"

    @abc.abstractmethod
    def layer(self, given: LayerToPack) -> RaggedEntries:
        """The entries [E, d] of one layer."""

    def __call__(
        self, prefill: Prefill, selection: Selection, scores: Tensor, rule: PrototypeRule
    ) -> RaggedCache:
        """Pack `selection`, layer by layer.

        Args:
            prefill: one sequence.
            selection: the entries that stay.
            scores: R^tok [L, G, N], the weights of merged values.
            rule: how the tokens of one node merge.
        """
        spans = prefill.spans
        layouts = selection.layouts(spans.length, prefill.keys, spans.past)
        given = (LayerToPack(prefill.layer(n), x, scores[n], rule) for n, x in enumerate(layouts))
        return RaggedCache(tuple(map(self.layer, given)), length=spans.length - 1)


PACKERS = Registry("pack", "how a chosen node becomes an entry", Packer)
