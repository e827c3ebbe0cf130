"""`LimitedLayer`: a cache layer that records the last queries for the next cut."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from gracekv.backends import AttentionStep
from gracekv.decode import HeldLayer
from gracekv.hf.layer import GraceLayer
from gracekv.hf.packed_layer import PackedLayer, repeats
from gracekv.kernels.rope import Rope

# Heads are padded to a multiple of this many entries.
_PLACES = 128


class LimitedLayer(GraceLayer):
    """A `GraceLayer` whose tail grows up to the limit of its cache and is then cut.

    Args:
        packed: the compressed part.
        queries: Q, how many of the last queries it records.

    Attributes:
        room: maximum number of tokens in the tail.
        carried: scores float32 [E] of the packed entries, or None for scores of 0.
        places: int [E], the positions that their keys are rotated to; None if gaps are never
            closed.
        how: scale, softcap and sink logits of the last step, as in `AttentionStep`.
    """

    def __init__(self, packed: PackedLayer, queries: int) -> None:
        super().__init__(packed)
        self.room = self._oldest = 0
        self.carried: Tensor | None = None
        self.places: Tensor | None = None
        self.how: tuple[Any, ...] = (1.0, None, None)
        self._queries, self._asked = queries, torch.zeros(1, 0, 0, 0, dtype=torch.float32)

    def _grow(self, batch: int, capacity: int) -> None:
        super()._grow(batch, min(capacity, max(self.room, self._used)))

    def record(self, step: AttentionStep) -> None:
        query, old = step.query, self._asked
        self.how = step.scale, step.softcap, step.sink_logits
        # As for the tail: tensors made in inference mode cannot be written to outside it.
        lost = old.is_inference() and not torch.is_inference_mode_enabled()
        if lost or len(old) != len(query) or old.shape[1] != query.shape[1]:
            self._asked = query.new_zeros(len(query), query.shape[1], self._queries, query.shape[3])
            if old.numel():
                self._asked += old.repeat_interleave(repeats(len(old), len(query)), dim=0)
        if take := min(query.shape[2], self._queries):
            places = torch.arange(self._used - take, self._used, device=query.device)
            self._asked[:, :, places % self._queries] = query[:, :, -take:].detach()
        # Oldest place of the tail whose query is still recorded; `crop` lowers `_used`.
        self._oldest = max(min(self._oldest, self._used - take), self._used - self._queries)

    def row_queries(self, row: int) -> tuple[Tensor, Tensor]:
        """The recorded queries [H, Q, d] of a row, and their places in the tail [Q]."""
        exact = self.packed.entries.exact
        places = torch.arange(min(self._oldest, self._used), self._used, device=exact.device)
        if not self._asked.numel():
            return exact.keys.new_zeros(exact.heads, 0, exact.dim), places[:0]
        return self._asked[row][:, places % self._queries], places

    def held(self, number: int, row: int, visible: Tensor, prompt: int, rope: Rope) -> HeldLayer:
        """The entries of a row and its recorded queries; positions count the tokens that are seen.

        Args:
            number: the layer's number among the compressed layers.
            row: the row.
            visible: bool [length], False for padding.
            prompt: tokens of the longest packed prompt.
            rope: rotations of the layer.
        """
        packed = self.packed.entries.exact
        heads, used, length = packed.heads, self._used, self.packed.length
        of_row, each = self.rows_of(self.batch), self.batch // packed.sequences
        at = heads * (row // each if of_row is None else int(of_row[row]))
        starts = packed.offsets[at : at + heads + 1].tolist()
        counts = [end - start for start, end in itertools.pairwise(starts)]
        # oneDNN compiles a kernel per shape, so widths are rounded up for cuts to share them.
        width = -(-(max(counts) + used) // _PLACES) * _PLACES - used

        def padded(rows: Tensor, tail: Any, nothing: float = 0.0) -> Tensor:
            """[G, N, ...]: the row's packed `rows` of each head, padding, and the tail."""
            buffer = rows.new_empty(heads, width + used, *rows.shape[1:])
            for part, start, count in zip(buffer, starts, counts, strict=False):
                part[:count] = rows[start : start + count]
                part[count:width] = nothing
            buffer[:, width:] = tail
            return buffer

        visible = visible.to(packed.device)
        # In a padded row, fewer positions belong to the prompt.
        position = visible.cumsum(0) - 1
        first, now = (torch.stack([position[prompt - 1], position[-1]]) + 1).tolist()
        tail, seen, mass = position[length:], visible[length:], packed.log_multiplicity
        new = (x[row] for x in self._tail(used)) if used else (0.0, 0.0)
        keys, values = map(padded, (packed.keys, packed.values), new)
        positions = padded(packed.positions, tail).long()
        places = None if self.places is None else padded(self.places, tail).long()
        carried = torch.zeros_like(mass) if self.carried is None else self.carried.to(mass)
        carried = padded(carried, 0.0)
        mass = padded(mass, torch.where(seen, 0.0, -torch.inf), -torch.inf)
        queries, at = self.row_queries(row)
        scale, softcap, sinks = self.how
        asked = (queries[:, seen[at]].float() * scale).unflatten(0, (heads, -1))
        moved = rope.moved(tail[at[seen[at]]], now).rotate(asked, torch.arange(asked.shape[2]))
        if moved.shape[2]:
            # Entries with a score of inf must stay only until there are queries.
            carried.nan_to_num_(posinf=0.0)
        facts = first, now, softcap, sinks, places
        return HeldLayer(number, keys, values, mass, positions, asked, moved, carried, *facts)

    def reset(self) -> None:
        super().reset()
        self._asked, self._oldest = self._asked[:, :0, :0], 0

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self._asked.numel():
            self._asked = self._asked[indices.to(self._asked.device)]
