"""Who reads which entries: a list of nearly equal pieces of work, made once per compression.

Heads of a compressed cache differ in length, up to fifty times. Splitting all of them into the same
number of parts leaves most processors waiting for the longest head; here a head is cut into as many
pieces as its length asks for, and long pieces start first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A batch that reads a packed part often keeps the processors busy with larger pieces, and then
# fewer partial results are written. A list each, and one with a piece per head beyond (ours).
_COARSER = (1, 4, 16)


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """The packed entries of one layer cut into pieces.

    A sequence's pieces are numbered head by head; a piece's number in its sequence is the slot of
    its partial result.

    Attributes:
        items: int64 [W, 4], sequence by sequence, longest first inside one: KV head, first entry,
            entries, slot.
        item_first: int64 [S+1]; sequence s has items [item_first[s], item_first[s+1]).
        row_first: int64 [S, G+1]; head g of sequence s has slots
            [row_first[s, g], row_first[s, g+1]).
        slots: most pieces that any sequence has.
    """

    items: Tensor
    item_first: Tensor
    row_first: Tensor
    slots: int

    @property
    def bytes(self) -> int:
        """Bytes of the three tables."""
        tables = (self.items, self.item_first, self.row_first)
        return sum(table.numel() * table.element_size() for table in tables)

    def to(self, device: torch.device) -> WorkList:
        """The same list on `device`."""
        return WorkList(
            self.items.to(device),
            self.item_first.to(device),
            self.row_first.to(device),
            self.slots,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Work lists of one layer from fine to coarse.

    Attributes:
        lists: pieces of growing size; the last has a piece per head.
    """

    lists: tuple[WorkList, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all lists."""
        return sum(work.bytes for work in self.lists)

    def pick(self, readers: int) -> WorkList:
        """The list for query tiles that read each packed row `readers` times."""
        level = sum(readers >= factor for factor in _COARSER[1:])
        # Beyond the last factor, readers alone fill the processors.
        return self.lists[-1 if readers >= 4 * _COARSER[-1] else level]


def plan(offsets: Tensor, sequences: int, pieces: int, block: int, device: torch.device) -> Plan:
    """The work lists of a packed layer.

    Args:
        offsets: int64 [S*G+1] on the CPU, entries of row s*G + g.
        sequences: S.
        pieces: how many pieces should be about right for one reader.
        block: entries of a kernel step; pieces are whole blocks where the head allows.
        device: where the lists are to lie.
    """
    total = int(offsets[-1])
    lists = []
    for factor in _COARSER:
        blocks = -(-total * factor // (pieces * block))
        lists.append(work_list(offsets, sequences, max(blocks, 1) * block, block))
    lists.append(work_list(offsets, sequences, max(total, 1), block))
    return Plan(tuple(work.to(device) for work in lists))


def work_list(offsets: Tensor, sequences: int, size: int, block: int) -> WorkList:
    """Rows cut into equal pieces of at most about `size` entries, whole blocks each.

    Args:
        offsets: int64 [S*G+1] on the CPU, of a `RaggedLayer`.
        sequences: S.
        size: entries of a piece.
        block: entries that a kernel reads at once.
    """
    lengths = offsets.diff()
    count = _ceil(lengths, lengths.new_tensor(size))
    even = _round_up(_ceil(lengths, count.clamp(min=1)), block).clamp(min=block)
    count = _ceil(lengths, even)

    rows = len(lengths)
    row = torch.repeat_interleave(torch.arange(rows), count)
    first = torch.cat([count.new_zeros(1), count.cumsum(0)])
    within = torch.arange(len(row)) - first[row]
    begin = within * even[row]
    length = torch.minimum(even[row], lengths[row] - begin)

    heads = rows // sequences
    item_first = first[::heads]
    sequence = row // heads
    slot = torch.arange(len(row)) - item_first[sequence]
    items = torch.stack([row % heads, offsets[row] + begin, length, slot], dim=1)
    # Stable sorts, the minor key first: sequence by sequence, longest first, then by slot.
    order = torch.argsort(length, descending=True, stable=True)
    order = order[torch.argsort(sequence[order], stable=True)]
    inside = [first[s * heads : (s + 1) * heads + 1] - item_first[s] for s in range(sequences)]
    return WorkList(
        items=items[order],
        item_first=item_first.contiguous(),
        row_first=torch.stack(inside),
        slots=int(item_first.diff().max()),
    )


def tail_splits(size: int, readers: int, pieces: int, block: int) -> tuple[int, int]:
    """Into how many pieces of how many places a tail of `size` places is cut.

    Args:
        size: C; places, not tokens: the grid may not follow a length that grows.
        readers: programs that there are already, without a cut.
        pieces: how many programs should be about right.
        block: places of a kernel step; a piece has at least two of them (ours).
    """
    if size == 0:
        return 0, 0
    splits = min(-(-size // (2 * block)), max(1, pieces // readers))
    chunk = -(-size // splits)
    chunk = -(-chunk // block) * block
    return -(-size // chunk), chunk


def _ceil(numbers: Tensor, by: Tensor) -> Tensor:
    return (numbers + by - 1) // by


def _round_up(numbers: Tensor, block: int) -> Tensor:
    return (numbers + block - 1) // block * block
