"""Entries of a layer in splits of equal size, the work units of the `numba` kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from gracekv.backends.attention_args import AttentionArgs, CodedArgs
from gracekv.backends.base import sequence_of_row
from gracekv.backends.sdpa import Layer, Sdpa
from gracekv.cache.coded import CodedEntries, Codes
from gracekv.kernels import ragged
from gracekv.kernels.addresses import address

# Entries per split: enough to outweigh its fixed cost, few enough to balance threads. Ours.
_ENTRIES = 256
# Maximum queries of a KV head, over all its continuations, for which one pass over the entries is
# faster than matrix products; measured with d = 64 and 128 on two x86 cores.
_MOST_QUERIES = 96


@dataclass(frozen=True, slots=True, eq=False)
class SplitKV:
    """The splits of a layer for a batch of continuations.

    Attributes:
        tables: tensors by their names in `AttentionArgs`, which documents their shapes, such as
            `splits` [P, 5]; for coded parts also those that `parts` points to.
        args: the fields of `AttentionArgs` that do not change between steps, as bytes.
    """

    tables: Mapping[str, Tensor]
    args: bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all tables."""
        return len(self.args) + sum(x.nbytes for x in self.tables.values())


class SplitEntries:
    """A layer and its splits for the latest batch; safe to use from several threads.

    Attributes:
        layer: the packed entries.
        views: views of its heads, for steps that the kernel does not support.
        held_bytes: bytes of the latest splits.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.views = Sdpa().prepare(layer)
        self.held_bytes = 0
        self._split = lru_cache(maxsize=1)(partial(_split, layer))

    def splits(self, batch: int, heads: int, rows: Tensor | None) -> SplitKV | None:
        """The splits for one token of `batch` rows, `rows` [B], and `heads` query heads.

        Cached while these stay the same. None if matrix products are faster because of many
        queries, or if the entries are not contiguous.
        """
        of_row = None if rows is None else tuple(rows.tolist())
        splits = self._split(batch, heads // self.layer.heads, of_row)
        self.held_bytes = 0 if splits is None else splits.held_bytes
        return splits


@torch.inference_mode(False)
@torch.no_grad()
def _split(layer: Layer, batch: int, group: int, rows: tuple[int, ...] | None) -> SplitKV | None:
    given = None if rows is None else torch.tensor(rows, device="cpu")
    of_row = sequence_of_row(given, batch, layer.sequences, torch.device("cpu"))
    counts = torch.bincount(of_row, minlength=layer.sequences)
    most_queries = int(counts.max()) * group
    if most_queries > _MOST_QUERIES or not all(x.is_contiguous() for x in layer.tensors().values()):
        return None
    exact, coded = layer.exact, layer.coded
    queries = (counts * group).repeat_interleave(layer.heads)  # of each row
    # Rows of all parts, part after part; those without queries are skipped.
    offsets = torch.stack([exact.offsets, *(entries.offsets for entries in coded)])
    counts_of_splits = ragged.blocks(offsets.diff(dim=1), _ENTRIES) * (queries > 0)
    cell, step = ragged.rows_and_steps(counts_of_splits.flatten())
    part, row = cell // len(queries), cell % len(queries)
    first = offsets[part, row] + step * _ENTRIES
    last = torch.minimum(first + _ENTRIES, offsets[part, row + 1])
    order = row.argsort(stable=True)
    row, slots = row[order], ragged.offsets(queries[row[order]])
    continuations = of_row.argsort(stable=True)
    blocks = [entries.block_offsets for entries in coded]
    described = [_described(*each) for each in zip(coded, blocks, strict=True)]
    tables = {
        "splits": torch.stack([row, first[order], last[order], slots[:-1], part[order]], dim=1),
        "row_splits": ragged.offsets(torch.bincount(row, minlength=len(queries))),
        "sequence_start": ragged.offsets(counts),
        "continuations": continuations,
        "sequence_of": of_row[continuations],
        "parts": torch.tensor(list(b"".join(described)), dtype=torch.uint8, device="cpu"),
    }
    kinds = {name: torch.uint8 if name == "parts" else torch.int64 for name in tables}
    args = AttentionArgs(
        **{name: address(name, x, kinds[name], *x.shape) for name, x in tables.items()},
        keys=address("keys", exact.keys, layer.dtype, exact.entries, exact.dim),
        values=address("values", exact.values, layer.dtype, exact.entries, exact.dim),
        bias=address("bias", exact.log_multiplicity, torch.float32, exact.entries),
        part_count=len(described),
        entries=exact.entries,
        dim=exact.dim,
        heads=layer.heads,
        group=group,
        rows=len(layer.lengths),
        batch=batch,
        packed_splits=len(order),
        packed_slots=int(slots[-1]),
        longest=_ENTRIES,
        most_queries=most_queries,
    )
    held = {f"blocks.{number}": table for number, table in enumerate(blocks)}
    return SplitKV({**tables, **held}, bytes(args))


def _described(coded: CodedEntries, blocks: Tensor) -> bytes:
    """`CodedArgs` of a part with the block offsets `blocks`."""
    coding = coded.coding
    args = CodedArgs(
        bias=address("bias", coded.log_multiplicity, torch.float32, coded.entries),
        offsets=address("offsets", coded.offsets, torch.int64, len(coded.offsets)),
        blocks=address("blocks", blocks, torch.int64, len(coded.offsets)),
        entries=coded.entries,
        block_count=int(blocks[-1]),
        bits=coding.bits,
        columns=coded.dim // min(coding.group, coded.dim),
        group_size=coding.group,
    )
    for name in ("key", "value"):
        made: Codes = getattr(coded, f"{name}s")
        for part in ("codes", "scale", "zero"):
            setattr(args, f"{name}_{part}", getattr(made, part).data_ptr())
    return bytes(args)
