"""What tree building knows, and how slots and layers are gathered into batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.prefill import Prefill
from gracekv.segment.base import Partition
from gracekv.tree.merge import PrototypeRule


@dataclass(frozen=True, slots=True, eq=False)
class TreeContext:
    """The inputs of one forest.

    Attributes:
        prefill: one sequence.
        partition: J slots over the N compressible tokens.
        tokens: R^tok [L, G, N] float32.
        evidence: S-hat [N] float32.
        sensitivity: omega [L, G] float32.
        rule: how tokens merge.
        forced: floor score [L, G, N] float64 of tokens that must be extracted first, -inf
            elsewhere; None: no floor.
        curvature: kappa [T], or None if no strategy needs it.
    """

    prefill: Prefill
    partition: Partition
    tokens: Tensor
    evidence: Tensor
    sensitivity: Tensor
    rule: PrototypeRule
    forced: Tensor | None = None
    curvature: Tensor | None = None

    def layer_groups(self, limit: int) -> Iterator[list[int]]:
        """Consecutive layers on one device whose tables take about `limit` bytes together."""
        prefill, lengths = self.prefill, self.partition.lengths
        tables = int((lengths * (lengths + 1) // 2 + lengths * lengths).sum()) * 8
        gathered = self.partition.region.length * (3 * prefill.head_dim + 64) * 4
        each = prefill.kv_heads * (tables + gathered)
        group: list[int] = []
        for layer, keys in enumerate(prefill.keys):
            other = group and prefill.keys[group[0]].device != keys.device
            if group and (other or (len(group) + 1) * each > limit):
                yield group
                group = []
            group.append(layer)
        yield group


@dataclass(frozen=True, slots=True, eq=False)
class SlotBatch:
    """Slots of one length.

    Attributes:
        slots: int64 [S] slot indices, ascending.
        starts: int64 [S] absolute.
        n: tokens of each.
    """

    slots: Tensor
    starts: Tensor
    n: int

    def offsets(self, origin: int) -> Tensor:
        """int64 [S, n]: position - origin of each token."""
        return self.starts[:, None] - origin + torch.arange(self.n, device=self.starts.device)

    def chunk(self, first: int, last: int) -> SlotBatch:
        """Slots [first, last) of the batch."""
        return SlotBatch(self.slots[first:last], self.starts[first:last], self.n)


def slot_batches(partition: Partition, device: torch.device) -> Iterator[SlotBatch]:
    """The partition's slots, gathered by length, so that nothing is padded."""
    lengths = partition.lengths
    for n in torch.unique(lengths).tolist():
        slots = torch.nonzero(lengths == n).flatten()
        yield SlotBatch(slots.to(device), partition.starts[slots].to(device), n)
