"""Tables of splits for the `triton` kernel: nearly equal units of work, made once per compression.

Heads of a compressed cache differ in length by up to fifty times. With the same number of splits
for each, most processors would wait for the longest head; here the number of a head's splits
depends on its length, and long splits start first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracekv.cache.coded import CodedEntries
from gracekv.cache.entries import LayerEntries
from gracekv.kernels import ragged
from gracekv.kernels.uploads import upload_all
from gracekv.registry.hyperparameter import parts_of

# With more query tiles per packed row, larger splits also fill the GPU and write fewer partial
# results: there are tables for at least this many readers of a row, and beyond that one split per
# head (ours).
_READERS = (1, 4, 16)
# Splits of a single kernel step do not use its software pipeline. These sizes are preferred if
# there are still enough splits for this share of the processors (ours).
_PREFERRED_SIZES = (256, 192, 128)
_FILLED = 0.9


@dataclass(frozen=True, slots=True, eq=False)
class PartSplits:
    """The splits of the unquantised entries, or of one coded part.

    Attributes:
        items: int64 [W, 4], sequence by sequence, longest first within each: KV head, first entry,
            entries, slot; for a coded part [W, 5], also the index that the first entry would have
            if all blocks of all rows were full.
        item_first: int64 [S+1]; sequence s has items [item_first[s], item_first[s+1]).
        most: maximum number of items of a sequence.
    """

    items: Tensor
    item_first: Tensor
    most: int

    def arguments(self, entries: CodedEntries) -> tuple[list[Tensor], list[int]]:
        """`codes` and `codings` of `ragged_attention` for a coded part: 9 tensors and 3 numbers.

        The tensors are codes, scales and zero points of keys and values as `Codes` describes them,
        log multiplicities [E], `items` and `item_first`.
        """
        coding, keys, values = entries.coding, entries.keys, entries.values
        stored = [keys.codes, keys.scale, keys.zero, values.codes, values.scale, values.zero]
        tensors = [*stored, entries.log_multiplicity, self.items, self.item_first]
        return tensors, [coding.bits, coding.group, self.most]


@dataclass(frozen=True, slots=True, eq=False)
class SplitTable:
    """The packed entries of one layer in splits.

    A sequence's splits are numbered head by head, those of coded parts after a head's others; a
    split's number in its sequence is the slot of its partial result.

    Attributes:
        parts: the splits of the unquantised entries, and of each coded part.
        row_first: int64 [S, G+1]; head g of sequence s has slots
            [row_first[s, g], row_first[s, g+1]).
        slots: maximum number of splits of a sequence, including coded ones.
    """

    parts: tuple[PartSplits, ...]
    row_first: Tensor
    slots: int


@dataclass(frozen=True, slots=True, eq=False)
class SplitTables:
    """Tables of one layer, from small to large splits.

    Attributes:
        tables: tables with increasing split sizes; the last has one split per head.
    """

    tables: tuple[SplitTable, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all tables."""
        return sum(x.nbytes for x in parts_of(self) if isinstance(x, Tensor))

    def for_readers(self, readers: int) -> SplitTable:
        """The table for `readers` query tiles per packed row."""
        level = sum(readers >= least for least in _READERS[1:])
        # Beyond the last level, the readers are enough to fill the processors.
        return self.tables[-1 if readers >= 4 * _READERS[-1] else level]


def split_tables(
    layers: Sequence[LayerEntries], blocks: list[int], processors: int, per_processor: int
) -> list[SplitTables]:
    """The tables of packed layers, on their device.

    Args:
        layers: layers of S sequences and G heads each.
        blocks: entries per kernel step in each layer; splits are whole blocks if the head allows.
        processors: streaming multiprocessors of the GPU.
        per_processor: target number of splits for each of them.
    """
    sizes = []
    for layer, block in zip(layers, blocks, strict=True):
        total = sum(int(part.offsets[-1]) for part in (layer.exact, *layer.coded))
        every = [split_size(total * least, block, processors, per_processor) for least in _READERS]
        sizes.append([*every, max(total, 1)])
    return tables_of_sizes(layers, sizes, blocks)


def split_size(entries: int, block: int, processors: int, per_processor: int) -> int:
    """Entries per split if `entries` are read in total, counted once per reader.

    `per_processor` splits for each of `processors`; fewer and longer ones if these would be shorter
    than the preferred sizes and almost every processor still gets one.
    """
    size = max(1, -(-entries // (processors * per_processor * block))) * block
    for preferred in _PREFERRED_SIZES:
        longer = -(-preferred // block) * block
        if longer > size and entries >= _FILLED * processors * longer:
            return longer
    return size


def tables_of_sizes(
    layers: Sequence[LayerEntries], sizes: list[list[int]], blocks: list[int]
) -> list[SplitTables]:
    """Each row in equal splits of whole blocks and at most about the given size.

    Made together, as if all N tables were sequences of one, since small operations take the host as
    long as large ones.

    Args:
        layers: L, of S sequences and G heads each.
        sizes: [L, K], entries per split in each table of a layer.
        blocks: [L], entries per kernel step.
    """
    parts, levels = 1 + max(len(layer.coded) for layer in layers), len(sizes[0])
    sequences, rows = layers[0].sequences, len(layers[0].exact.offsets) - 1
    heads = rows // sequences
    every = torch.stack([_rows(layer, rows, parts) for layer in layers])
    begins, lengths, full = every.repeat_interleave(levels, dim=0).permute(1, 2, 0, 3).flatten(2)
    size = every.new_tensor(sizes).flatten().repeat_interleave(rows)
    block = every.new_tensor(blocks).repeat_interleave(levels * rows)
    each = ragged.blocks(lengths, ragged.blocks(lengths, size).clamp(min=1))
    # Entries per split of each row, and number of its splits.
    even = torch.maximum(ragged.blocks(each, block) * block, block)
    counts = ragged.blocks(lengths, even)
    # Slots of all sequences, row by row and part by part.
    slots = ragged.offsets(counts.T.flatten())
    starts = slots[:: heads * parts]
    inside = slots[::parts].unfold(0, heads + 1, heads) - starts[:-1, None]
    found: list[Any] = [inside.unflatten(0, (-1, sequences))]
    most = []
    for part in range(parts):
        row, step = ragged.rows_and_steps(counts[part])
        begin = step * even[part, row]
        length = torch.minimum(even[part, row], lengths[part, row] - begin)
        sequence = row // heads
        slot = slots[row * parts + part] + step - starts[sequence]
        columns = [row % heads, begins[part, row] + begin, length, slot, full[part, row] + begin]
        # Stable sorts, the minor key first: sequence by sequence, longest first, then by slot.
        order = torch.argsort(length, descending=True, stable=True)
        order = order[torch.argsort(sequence[order], stable=True)]
        first = ragged.offsets(torch.bincount(sequence, minlength=len(starts) - 1))
        firsts = first.unfold(0, sequences + 1, sequences)
        items = torch.stack(columns if part else columns[:4], dim=1)[order]
        found += [items.split(first[::sequences].diff().tolist()), firsts - firsts[:, :1]]
        most.append(firsts.diff().amax(dim=1).tolist())
    most.append(starts.diff().view(-1, sequences).amax(dim=1).tolist())
    there = iter(upload_all([x for own in zip(*found, strict=True) for x in own], layers[0].device))
    numbers = zip(*most, strict=True)

    def table(layer: LayerEntries) -> SplitTable:
        row_first, (*longest, count) = next(there), next(numbers)
        own = [PartSplits(next(there), next(there), splits) for splits in longest]
        return SplitTable(tuple(own[: 1 + len(layer.coded)]), row_first, count)

    return [SplitTables(tuple(table(layer) for _ in range(levels))) for layer in layers]


def _rows(layer: LayerEntries, rows: int, parts: int) -> Tensor:
    """int64 [3, parts, rows]: first entries, lengths, and first entries if all blocks were full.

    Missing parts have no entries.
    """
    made = np.zeros((3, parts, rows), dtype=np.int64)
    for part, entries in enumerate((layer.exact, *layer.coded)):
        offsets = entries.offsets.numpy()
        made[0, part], made[1, part] = offsets[:-1], np.diff(offsets)
        if part:
            made[2, part] = entries.block_offsets[:-1] * entries.coding.group
    return torch.from_numpy(made)


def tail_splits(size: int, readers: int, programs: int, block: int) -> tuple[int, int]:
    """The number of splits of a tail of `size` places, and places per split.

    Args:
        size: C, in places, not tokens: the grid must not depend on a growing length.
        readers: number of programs without splits.
        programs: target number of programs.
        block: places per kernel step; a split has at least two blocks (ours).
    """
    if size == 0:
        return 0, 0
    splits = min(-(-size // (2 * block)), max(1, programs // readers))
    chunk = -(-size // splits)
    chunk = -(-chunk // block) * block
    return -(-size // chunk), chunk
