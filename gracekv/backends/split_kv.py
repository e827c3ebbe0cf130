"""How one token's queries share out a layer's entries among threads, for the `numba` backend."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gracekv.backends.base import sequence_of_row
from gracekv.cache.base import RaggedLayer

# Entries of a piece: enough to hide what each costs by itself, few enough to share out. Ours.
_ENTRIES = 256
# Queries of a KV head and all its continuations that were measured to be faster in one pass over
# the entries than in matrix products: with d = 64 and 128 on two x86 cores, up to this many.
_MOST_QUERIES = 96


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The pieces of a layer for a batch of continuations.

    Attributes:
        pieces: int64 [P, 4]: row, first and last + 1 entry, first slot of its partial results.
        row_pieces: int64 [Z + 1], the first piece of each row.
        member_start: int64 [S + 1], the first member of each sequence.
        members: int64 [B], the continuations, by sequence.
        sequence_of: int64 [B], the sequence of each member.
        slots: partial results of all pieces.
        longest: the most entries of a piece.
        task: what of a step's `Task` is the same at every step, as bytes.
    """

    pieces: Tensor
    row_pieces: Tensor
    member_start: Tensor
    members: Tensor
    sequence_of: Tensor
    slots: int
    longest: int
    task: bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of everything."""
        lists = (self.pieces, self.row_pieces, self.member_start, self.members, self.sequence_of)
        return len(self.task) + sum(x.numel() * x.element_size() for x in lists)


Key = tuple[int, int, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Plans:
    """A layer and the plan of the latest batch.

    Attributes:
        layer: the packed entries.
        plans: at most one plan; None stands for "not by pieces".
    """

    layer: RaggedLayer
    plans: dict[Key, Plan | None] = field(default_factory=dict)

    def plan(self, batch: int, heads: int, rows: Tensor | None) -> Plan | None:
        """The plan for one token of `batch` rows, `rows` [B], and `heads` query heads; built once.

        None if there are so many queries that matrix products suit them, or the entries do not lie
        one after the other.
        """
        key = (batch, heads, None if rows is None else tuple(rows.tolist()))
        if key not in self.plans:
            with torch.inference_mode(False), torch.no_grad():
                made = _plan(self.layer, batch, heads // self.layer.heads, rows)
            self.plans.clear()
            self.plans[key] = made
        return self.plans[key]

    @property
    def held_bytes(self) -> int:
        """Bytes of the latest plan."""
        return sum(plan.held_bytes for plan in self.plans.values() if plan is not None)


def _plan(layer: RaggedLayer, batch: int, group: int, rows: Tensor | None) -> Plan | None:
    of_row = sequence_of_row(rows, batch, layer.sequences, torch.device("cpu")).cpu()
    members = torch.bincount(of_row, minlength=layer.sequences)
    widest = int(members.max()) * group
    stored = (layer.keys, layer.values, layer.log_multiplicity)
    if widest > _MOST_QUERIES or not all(x.is_contiguous() for x in stored):
        return None
    queries = (members * group).repeat_interleave(layer.heads)  # of each row
    # A row that nobody continues is left out.
    counts = (layer.lengths + _ENTRIES - 1) // _ENTRIES * (queries > 0)
    row = torch.repeat_interleave(counts)
    row_pieces = _starts(counts)
    first = layer.offsets[row] + (torch.arange(len(row)) - row_pieces[row]) * _ENTRIES
    last = torch.minimum(first + _ENTRIES, layer.offsets[row + 1])
    slots = _starts(queries[row])
    order = of_row.argsort(stable=True)
    pieces = torch.stack([row, first, last, slots[:-1]], dim=1)
    member_start, sequence_of = _starts(members), of_row[order]

    from gracekv.kernels.attention_cpu import Task

    task = Task(
        keys=layer.keys.data_ptr(),
        values=layer.values.data_ptr(),
        bias=layer.log_multiplicity.data_ptr(),
        pieces=pieces.data_ptr(),
        row_pieces=row_pieces.data_ptr(),
        member_start=member_start.data_ptr(),
        members=order.data_ptr(),
        sequence_of=sequence_of.data_ptr(),
        entries=layer.entries,
        dim=layer.keys.shape[1],
        heads=layer.heads,
        group=group,
        rows=len(layer.lengths),
        batch=batch,
        packed_pieces=len(pieces),
        packed_slots=int(slots[-1]),
        longest=_ENTRIES,
        widest=widest,
    )
    return Plan(
        pieces=pieces,
        row_pieces=row_pieces,
        member_start=member_start,
        members=order,
        sequence_of=sequence_of,
        slots=int(slots[-1]),
        longest=_ENTRIES,
        task=bytes(task),
    )


def _starts(counts: Tensor) -> Tensor:
    """[0, c0, c0 + c1, ...]."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
