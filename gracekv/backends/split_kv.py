"""Entries of a layer in splits of equal size, the work units of the `numba` kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv import ragged
from gracekv.backends.base import sequence_of_row
from gracekv.backends.latest import Latest
from gracekv.cache.base import RaggedLayer

# Entries of a split: enough to outweigh its fixed cost, few enough to balance threads. Ours.
_ENTRIES = 256
# Queries of a KV head, over all its continuations, up to which one pass over the entries is faster
# than matrix products; measured with d = 64 and 128 on two x86 cores.
_MOST_QUERIES = 96


@dataclass(frozen=True, slots=True, eq=False)
class SplitKV:
    """The splits of a layer for a batch of continuations.

    Attributes:
        splits: int64 [P, 4]: row, first and last + 1 entry, first slot of its partial results.
        row_splits: int64 [Z + 1], the first split of each row.
        sequence_start: int64 [S + 1], the first continuation of each sequence.
        continuations: int64 [B], batch rows ordered by sequence.
        sequence_of: int64 [B], the sequence of each continuation.
        slots: partial results of all splits.
        longest: the most entries of a split.
        args: the fields of `AttentionArgs` that are the same at every step, as bytes.
    """

    splits: Tensor
    row_splits: Tensor
    sequence_start: Tensor
    continuations: Tensor
    sequence_of: Tensor
    slots: int
    longest: int
    args: bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all tables."""
        tables = (
            self.splits,
            self.row_splits,
            self.sequence_start,
            self.continuations,
            self.sequence_of,
        )
        return len(self.args) + sum(x.numel() * x.element_size() for x in tables)


Key = tuple[int, int, tuple[int, ...] | None]


class SplitLayer:
    """A layer and its splits for the latest batch.

    Attributes:
        layer: the packed entries.
    """

    def __init__(self, layer: RaggedLayer) -> None:
        self.layer = layer
        self._latest: Latest[Key, SplitKV | None] = Latest()

    def splits(self, batch: int, heads: int, rows: Tensor | None) -> SplitKV | None:
        """The splits for one token of `batch` rows, `rows` [B], and `heads` query heads.

        Built once while these stay the same. None if there are so many queries that matrix
        products are faster, or the entries are not contiguous.
        """
        key = (batch, heads, None if rows is None else tuple(rows.tolist()))

        def build() -> SplitKV | None:
            with torch.inference_mode(False), torch.no_grad():
                return _split(self.layer, batch, heads // self.layer.heads, rows)

        return self._latest.get(key, build)

    @property
    def held_bytes(self) -> int:
        """Bytes of the latest splits."""
        splits = self._latest.value
        return 0 if splits is None else splits.held_bytes


def _split(layer: RaggedLayer, batch: int, group: int, rows: Tensor | None) -> SplitKV | None:
    of_row = sequence_of_row(rows, batch, layer.sequences, torch.device("cpu")).cpu()
    counts = torch.bincount(of_row, minlength=layer.sequences)
    most_queries = int(counts.max()) * group
    stored = (layer.keys, layer.values, layer.log_multiplicity)
    if most_queries > _MOST_QUERIES or not all(x.is_contiguous() for x in stored):
        return None
    queries = (counts * group).repeat_interleave(layer.heads)  # of each row
    # A row without continuations is left out.
    row_counts = (layer.lengths + _ENTRIES - 1) // _ENTRIES * (queries > 0)
    row, step = ragged.rows_and_steps(row_counts)
    first = layer.offsets[row] + step * _ENTRIES
    last = torch.minimum(first + _ENTRIES, layer.offsets[row + 1])
    slots = ragged.offsets(queries[row])
    splits = torch.stack([row, first, last, slots[:-1]], dim=1)
    row_splits, sequence_start = ragged.offsets(row_counts), ragged.offsets(counts)
    continuations = of_row.argsort(stable=True)
    sequence_of = of_row[continuations]

    from gracekv.backends.numba_kernel import AttentionArgs

    args = AttentionArgs(
        keys=layer.keys.data_ptr(),
        values=layer.values.data_ptr(),
        bias=layer.log_multiplicity.data_ptr(),
        splits=splits.data_ptr(),
        row_splits=row_splits.data_ptr(),
        sequence_start=sequence_start.data_ptr(),
        continuations=continuations.data_ptr(),
        sequence_of=sequence_of.data_ptr(),
        entries=layer.entries,
        dim=layer.keys.shape[1],
        heads=layer.heads,
        group=group,
        rows=len(layer.lengths),
        batch=batch,
        packed_splits=len(splits),
        packed_slots=int(slots[-1]),
        longest=_ENTRIES,
        most_queries=most_queries,
    )
    return SplitKV(
        splits=splits,
        row_splits=row_splits,
        sequence_start=sequence_start,
        continuations=continuations,
        sequence_of=sequence_of,
        slots=int(slots[-1]),
        longest=_ENTRIES,
        args=bytes(args),
    )
