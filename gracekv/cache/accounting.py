"""Entries, bytes and seconds of a compression, and the occupancy of a cache that grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracekv.cache.entries import CompressedCache
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.errors import renamed

# Possible bits per number.
_WIDTHS = range(1, 65)


@dataclass(frozen=True, slots=True)
class WidthShare:
    """The entries that are stored with the same number of bits.

    Attributes:
        bits: bits per number: 32 or 16 in the model's dtype, fewer if quantised.
        entries: number of entries, including prefix and suffix.
        bytes: bytes of their keys and values, including scales and zero points.
    """

    bits: int
    entries: int
    bytes: int

    @classmethod
    def of(cls, cache: CompressedCache, shard: HeadShard = WHOLE) -> tuple[WidthShare, ...]:
        """The shares of all widths in `cache`, over all processes, widest first."""
        totals = np.zeros((len(_WIDTHS), 2), dtype=np.int64)
        for layer in cache.layers:
            for bits, share in layer.widths().items():
                totals[_WIDTHS.index(bits)] += share
        return cls.summed(map(cls, _WIDTHS, *shard.sum(torch.from_numpy(totals)).T.tolist()))

    @classmethod
    def summed(cls, shares: Iterable[WidthShare]) -> tuple[WidthShare, ...]:
        """Sum the shares by width, widest first, without empty widths."""
        entries, size = Counter[int](), Counter[int]()
        for share in shares:
            entries[share.bits] += share.entries
            size[share.bits] += share.bytes
        widths = sorted((bits for bits in entries if entries[bits]), reverse=True)
        return tuple(cls(bits, entries[bits], size[bits]) for bits in widths)


@dataclass(frozen=True, slots=True, eq=False)
class Accounting:
    """Entries and bytes of one compressed cache after compression.

    `cache.accounting` reports the entries held during generation (`Occupancy`).

    Attributes:
        budget: B_total, context entries allowed over all heads.
        spent: context entries kept, including the recent window but not prefix and suffix.
        floor_spent: B_floor, the part of `spent` that the floor stage bought.
        recent: r, tokens of the recent window in each head.
        entries: int64 [L, G] context entries kept per head, including the recent window.
        bytes: physical bytes of packed keys and values, including prefix and suffix and the scales
            and zero points of quantised entries.
        metadata_bytes: bytes of positions, multiplicities and offsets.
        full_bytes: bytes of a full cache's keys and values for the same tokens; for pipelines that
            quantise, in 16-bit numbers in any model dtype.
        utility: sum of the gains of all bought operations, each clipped at 0.
        bound: certified upper bound on `utility` at this budget; None if not computed.
        backend_bytes: bytes that the prepared attention backend holds in addition to the packed
            tensors (indices, copies).
        other_bytes: bytes of the uncompressed layers, by kind; of the other fields, only
            `held_bytes` includes them.
        held_bytes: all bytes that a result keeps alive, by device: entries, metadata, the backend's
            copies, scores, states of uncompressed layers, and the prompt's ids; not Python's
            objects, about 1 MB for 30 quantised layers. Empty for a run.
        widths: entries and bytes by bits per number, widest first.
        budget_bytes: bytes allowed for the context's keys and values, if the budget counts bytes
            and some entries are quantised; otherwise None.
        spent_bytes: bytes of the context's keys and values; None if `budget_bytes` is None.
    """

    budget: int
    spent: int
    floor_spent: int
    recent: int
    entries: Tensor
    bytes: int
    metadata_bytes: int
    full_bytes: int
    utility: float = 0.0
    bound: float | None = None
    backend_bytes: int = 0
    other_bytes: Mapping[str, int] = field(default_factory=dict)
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    widths: tuple[WidthShare, ...] = ()
    budget_bytes: int | None = None
    spent_bytes: int | None = None

    kept_bytes = renamed("kept_bytes", "other_bytes")

    @classmethod
    def total(cls, parts: Sequence[Accounting], backend_bytes: int = 0) -> Accounting:
        """Sum over several prompts of one model; `entries` is stacked to [S*L, G].

        `recent` is the largest. The bound is the sum if every part has one. `backend_bytes` is for
        all prompts together.
        """
        totals: dict[str, Any] = {
            "recent": max(part.recent for part in parts),
            "entries": torch.cat([part.entries for part in parts]),
            "backend_bytes": backend_bytes,
            "other_bytes": dict(sum((Counter(part.other_bytes) for part in parts), Counter())),
            "held_bytes": {},
            "widths": WidthShare.summed(share for part in parts for share in part.widths),
        }
        for name in {x.name for x in fields(cls)} - totals.keys():
            each = [getattr(part, name) for part in parts]
            totals[name] = None if None in each else sum(each)
        return cls(**totals)

    @property
    def full_in_16_bits(self) -> bool:
        """Whether `full_bytes` assumes 16 bits per number, as for quantised entries."""
        return self.budget_bytes is not None or any(x.bits < 16 for x in self.widths)

    @property
    def sizes(self) -> str:
        """The bytes as text."""
        return (
            f"{self.bytes:,} bytes of keys and values and {self.metadata_bytes:,} of metadata, "
            f"full cache {self.full_bytes:,}{' in 16 bits' if self.full_in_16_bits else ''}"
        )

    @property
    def budget_text(self) -> str:
        """The budget as text; of one in bytes, also what was spent."""
        if self.budget_bytes is None:
            return f"budget {self.budget:,}"
        return f"{self.spent_bytes:,} of {self.budget_bytes:,} bytes"

    def __repr__(self) -> str:
        return f"Accounting({self.spent:,} entries ({self.budget_text}); {self.sizes})"

    @property
    def certified_ratio(self) -> float | None:
        """utility / bound, a lower bound on the share of the optimum; None without a bound."""
        if self.bound is None:
            return None
        return self.utility / self.bound if self.bound > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Entries and bytes of a cache during generation, in all compressed layers, heads and rows.

    Sliding windows, states and free places for new tokens are not counted. A growing tail has at
    most as many free places as tokens, but at least 64 in total; a static one has its capacity.

    Attributes:
        entries: current entries, of the packed prompts and of later tokens.
        bytes: bytes of their keys and values.
        most_entries: peak number so far; exceeds `entries` only after a cut.
        most_bytes: bytes of the keys and values at the peak.
        cuts: number of cuts so far.
    """

    entries: int
    bytes: int
    most_entries: int
    most_bytes: int
    cuts: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds per stage.

    Attributes:
        prefill: the standard forward pass.
        surprisal: logits of all positions, during the capture.
        projections: projections for head sensitivity, during the capture.
        query_sums: sums over all queries, during the capture.
        reconstruction: a second pass over the context, if the scorer needs one.
        draft: decoding of the answer's first tokens, if the scorer needs them.
        segment: a pipeline stage, like those below.
        value: token scores and head sensitivity.
        tree: trees, quotas and candidates.
        allocate: floor and auction.
        pack: packing of the physical cache.
        fit: fit of values and multiplicities.
        precision: quantisation.
    """

    prefill: float = 0.0
    surprisal: float = 0.0
    projections: float = 0.0
    query_sums: float = 0.0
    reconstruction: float = 0.0
    draft: float = 0.0
    segment: float = 0.0
    value: float = 0.0
    tree: float = 0.0
    allocate: float = 0.0
    pack: float = 0.0
    fit: float = 0.0
    precision: float = 0.0

    @property
    def construction(self) -> float:
        """Everything but the prefill."""
        return sum(seconds for stage, seconds in self.as_dict().items() if stage != "prefill")

    def as_dict(self) -> Mapping[str, float]:
        """Seconds by stage, in order."""
        return {name: getattr(self, name) for name in self.__slots__}
