"""Attention over quantised entries a piece at a time, with torch's own operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.backends.base import Partial, sequence_of_row, united
from gracekv.backends.kv_windows import WindowedLayer
from gracekv.backends.sdpa_kernels import Kernel
from gracekv.cache.coded import CodedEntries

# Entries of one head that are dequantised at once. Ours.
_PIECE = 4096


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWindows:
    """A quantised layer for `Sdpa`.

    Attributes:
        windows: over the entries that are as they are.
        coded: the others, a part for each width, dequantised at every step.
    """

    windows: WindowedLayer
    coded: tuple[CodedEntries, ...]

    @property
    def held_bytes(self) -> int:
        """Bytes of the latest windows."""
        return self.windows.held_bytes


def attend_to_pieces(
    attend: Kernel, query: Tensor, coded: CodedEntries, scale: float, rows: Tensor | None
) -> Partial:
    """Attention of query [B, H, Tq, d] to the quantised entries of each row's sequence.

    At most `_PIECE` entries of one head exist as float32 numbers at any time.

    Args:
        attend: the kernel, called with float32 tensors.
        query: [B, H, Tq, d].
        coded: the entries.
        scale: factor of q . k.
        rows: int64 [B], the sequence of each row, or None.
    """
    batch, heads, tokens, dim = query.shape
    kv_heads = len(coded.lengths) // coded.sequences
    group = heads // kv_heads
    of_row = sequence_of_row(rows, batch, coded.sequences, query.device)
    output = query.new_zeros(query.shape, dtype=torch.float32)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    for sequence in range(coded.sequences):
        of_sequence = (of_row == sequence).nonzero()[:, 0]
        for head in range(kv_heads if len(of_sequence) else 0):
            row, at = sequence * kv_heads + head, slice(head * group, (head + 1) * group)
            asked = query[of_sequence, at].reshape(1, 1, -1, dim).float()
            found = _row(attend, asked, coded, row, scale)
            if found is not None:
                output[of_sequence, at] = found.output.view(-1, group, tokens, dim)
                lse[of_sequence, at] = found.lse.view(-1, group, tokens)
    return Partial(output, lse)


def _row(
    attend: Kernel, asked: Tensor, coded: CodedEntries, row: int, scale: float
) -> Partial | None:
    """Attention of `asked` [1, 1, R, d] to one head's entries; None if there are none."""
    begin, end = int(coded.offsets[row]), int(coded.offsets[row + 1])
    found: Partial | None = None
    for first in range(begin, end, _PIECE):
        stop = min(first + _PIECE, end)
        keys, values = coded.numbers(row, first, stop)
        bias = coded.log_multiplicity[first:stop].expand(1, 1, 1, -1)
        piece = Partial(*attend(asked, keys[None, None], values[None, None], bias, scale))
        found = piece if found is None else united(found, piece)
    return found
