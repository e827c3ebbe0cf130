"""Tables of splits for the `triton` kernel: nearly equal units of work, made once per compression.

Heads of a compressed cache differ in length, up to fifty times. With the same number of splits for
each, most processors would wait for the longest head; here the number of a head's splits follows
from its length, and long splits start first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.cache.coded import CodedEntries
from gracekv.cache.entries import LayerEntries
from gracekv.kernels import ragged

# With more query tiles on each packed row, larger splits fill the GPU too and write fewer partial
# results: a table for at least so many readers of a row, and one of a split per head beyond (ours).
_READERS = (1, 4, 16)
# Splits of one kernel step leave its software pipeline unused. Preferred sizes, where there are
# still enough splits for this share of the processors (ours).
_PREFERRED_SIZES = (256, 192, 128)
_FILLED = 0.9


@dataclass(frozen=True, slots=True, eq=False)
class PartSplits:
    """The splits of the unquantised entries, or of one coded part.

    Attributes:
        items: int64 [W, 4], sequence by sequence, longest first inside one: KV head, first entry,
            entries, slot; of a coded part [W, 5], also the number that the first entry would have
            if all blocks of all rows were full.
        item_first: int64 [S+1]; sequence s has items [item_first[s], item_first[s+1]).
        most: the most items of any sequence.
    """

    items: Tensor
    item_first: Tensor
    most: int

    def map(self, change: Callable[[Tensor], Tensor]) -> PartSplits:
        """The same splits with each tensor [...] replaced by `change` of it."""
        return PartSplits(change(self.items), change(self.item_first), self.most)

    def arguments(self, entries: CodedEntries) -> tuple[list[Tensor], list[int]]:
        """`codes` and `codings` of `ragged_attention` for a coded part: 9 tensors and 3 numbers.

        The tensors are codes, scales and zero points of keys and values as `Codes` describes them,
        log multiplicities [E], `items` and `item_first`.
        """
        coding, keys, values = entries.coding, entries.keys, entries.values
        stored = [keys.codes, keys.scale, keys.zero, values.codes, values.scale, values.zero]
        return (
            [*stored, entries.log_multiplicity, self.items, self.item_first],
            [coding.bits, coding.group, self.most],
        )


@dataclass(frozen=True, slots=True, eq=False)
class SplitTable:
    """The packed entries of one layer in splits.

    A sequence's splits are numbered head by head, those of coded parts after a head's others; a
    split's number in its sequence is the slot of its partial result.

    Attributes:
        parts: the splits of the unquantised entries, and of each coded part.
        row_first: int64 [S, G+1]; head g of sequence s has slots
            [row_first[s, g], row_first[s, g+1]).
        slots: the most splits of any sequence, coded ones included.
    """

    parts: tuple[PartSplits, ...]
    row_first: Tensor
    slots: int

    def map(self, change: Callable[[Tensor], Tensor]) -> SplitTable:
        """The same table with each tensor [...] replaced by `change` of it."""
        parts = tuple(part.map(change) for part in self.parts)
        return SplitTable(parts, change(self.row_first), self.slots)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        tables = (x for part in self.parts for x in (part.items, part.item_first))
        return self.row_first.nbytes + sum(table.nbytes for table in tables)


@dataclass(frozen=True, slots=True, eq=False)
class SplitTables:
    """Tables of one layer from small splits to large ones.

    Attributes:
        tables: tables with growing splits; the last has one split per head.
    """

    tables: tuple[SplitTable, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.bytes for table in self.tables)

    def map(self, change: Callable[[Tensor], Tensor]) -> SplitTables:
        """The same tables with each tensor [...] replaced by `change` of it."""
        return SplitTables(tuple(table.map(change) for table in self.tables))

    def for_readers(self, readers: int) -> SplitTable:
        """The table for `readers` query tiles on each packed row."""
        level = sum(readers >= least for least in _READERS[1:])
        # Beyond the last level, the readers alone fill the processors.
        return self.tables[-1 if readers >= 4 * _READERS[-1] else level]


def split_tables(
    layer: LayerEntries, block: int, processors: int, per_processor: int
) -> SplitTables:
    """The tables of a packed layer, on the CPU.

    Args:
        layer: S sequences.
        block: entries of a kernel step; splits are whole blocks where the head allows.
        processors: streaming multiprocessors of the GPU.
        per_processor: splits to aim at for each of them.
    """
    total = int(layer.lengths.sum())
    sizes = [split_size(total * least, block, processors, per_processor) for least in _READERS]
    return SplitTables(tuple(split_table(layer, size, block) for size in (*sizes, max(total, 1))))


def uploaded(tables: Sequence[SplitTables], device: torch.device) -> list[SplitTables]:
    """The tables of several layers on `device`, copied at once: the host waits for each copy."""
    found: list[Tensor] = []

    def collect(x: Tensor) -> Tensor:
        # Triton compiles a kernel once more for addresses that are not multiples of 16 bytes.
        found.append(functional.pad(x.flatten(), (0, x.numel() % 2)))
        return x

    for table in tables:
        table.map(collect)
    parts = iter(torch.cat(found).to(device).split([len(x) for x in found]))
    return [table.map(lambda x: next(parts)[: x.numel()].view(x.shape)) for table in tables]


def split_size(entries: int, block: int, processors: int, per_processor: int) -> int:
    """Entries of a split where `entries` are read in all, counted once per reader.

    `per_processor` splits for each of `processors`; fewer and longer ones where these are shorter
    than the preferred sizes and still almost every processor has one.
    """
    size = max(1, -(-entries // (processors * per_processor * block))) * block
    for preferred in _PREFERRED_SIZES:
        longer = -(-preferred // block) * block
        if longer > size and entries >= _FILLED * processors * longer:
            return longer
    return size


def split_table(layer: LayerEntries, size: int, block: int) -> SplitTable:
    """Each row in equal splits of at most about `size` entries, whole blocks each.

    Args:
        layer: S sequences.
        size: entries of a split.
        block: entries of a kernel step.
    """
    coded, sequences = layer.coded, layer.sequences
    stored = [layer.exact.offsets, *(part.offsets for part in coded)]
    sizes = [_even_sizes(part.diff(), size, block) for part in stored]
    counts = torch.stack(
        [ragged.blocks(part.diff(), even) for part, even in zip(stored, sizes, strict=True)], dim=1
    )
    parts, heads = len(stored), layer.heads
    # Slots of all sequences, row by row and part by part.
    slots = ragged.offsets(counts.flatten())
    starts = slots[:: heads * parts]

    made = []
    for part, (begins, even) in enumerate(zip(stored, sizes, strict=True)):
        row, step = ragged.rows_and_steps(counts[:, part])
        begin = step * even[row]
        length = torch.minimum(even[row], begins.diff()[row] - begin)
        sequence = row // heads
        slot = slots[row * parts + part] + step - starts[sequence]
        columns = [row % heads, begins[row] + begin, length, slot]
        if part:
            entries = coded[part - 1]
            columns.append(entries.block_offsets[row] * entries.coding.group + begin)
        # Stable sorts, the minor key first: sequence by sequence, longest first, then by slot.
        order = torch.argsort(length, descending=True, stable=True)
        order = order[torch.argsort(sequence[order], stable=True)]
        first = ragged.offsets(torch.bincount(sequence, minlength=sequences))
        items = torch.stack(columns, dim=1)[order]
        most = int(first.diff().max())
        made.append(PartSplits(items, first, most))
    inside = [
        slots[s * heads * parts : (s + 1) * heads * parts + 1 : parts] - starts[s]
        for s in range(sequences)
    ]
    return SplitTable(tuple(made), torch.stack(inside), int(starts.diff().max()))


def _even_sizes(lengths: Tensor, size: int, block: int) -> Tensor:
    """int64 [Z], entries of each row's splits."""
    each = ragged.blocks(lengths, ragged.blocks(lengths, size).clamp(min=1))
    return (ragged.blocks(each, block) * block).clamp(min=block)


def tail_splits(size: int, readers: int, programs: int, block: int) -> tuple[int, int]:
    """The number of splits of a tail of `size` places, and the places of each.

    Args:
        size: C; places, not tokens: the grid must not depend on a length that grows.
        readers: programs without a split.
        programs: number of programs to aim at.
        block: places of a kernel step; a split has at least two of them (ours).
    """
    if size == 0:
        return 0, 0
    splits = min(-(-size // (2 * block)), max(1, programs // readers))
    chunk = -(-size // splits)
    chunk = -(-chunk // block) * block
    return -(-size // chunk), chunk
