"""What tree building knows, and how slots are laid out in padded batches."""

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

    def layer_of(self, field: Tensor | None, layer: int) -> Tensor | None:
        """One layer's [G, N] slice of an [L, G, N] field, on that layer's device."""
        return None if field is None else field[layer].to(self.prefill.keys[layer].device)


@dataclass(frozen=True, slots=True, eq=False)
class SlotBatch:
    """Slots of similar length, padded to n tokens each.

    Attributes:
        slots: int64 [S] slot indices, ascending.
        starts: int64 [S] absolute.
        lengths: int64 [S], all <= n.
        n: padded length.
    """

    slots: Tensor
    starts: Tensor
    lengths: Tensor
    n: int

    def offsets(self, origin: int) -> Tensor:
        """int64 [S, n]: position - origin of each token; padding repeats the slot's last token."""
        step = torch.arange(self.n, device=self.starts.device)
        return self.starts[:, None] - origin + torch.minimum(step, self.lengths[:, None] - 1)

    def valid(self) -> Tensor:
        """bool [S, n]: not padding."""
        return torch.arange(self.n, device=self.starts.device) < self.lengths[:, None]

    def chunk(self, first: int, last: int) -> SlotBatch:
        """Slots [first, last) of the batch."""
        at = slice(first, last)
        return SlotBatch(self.slots[at], self.starts[at], self.lengths[at], self.n)


def slot_batches(
    partition: Partition, device: torch.device, step: int = 8, per_batch: int | None = None
) -> Iterator[SlotBatch]:
    """The partition's slots by length rounded up to `step`, so that little is padding.

    Single-token slots form a batch of their own. At most `per_batch` slots a batch.
    """
    lengths = partition.lengths.to(device)
    starts = partition.starts.to(device)
    padded = torch.where(lengths == 1, 1, (lengths + step - 1) // step * step)
    for n in padded.unique().tolist():
        slots = torch.nonzero(padded == n).flatten()
        # The longest slot of the batch may be shorter than the rounded length.
        width = int(lengths[slots].max())
        for part in slots.split(per_batch or len(slots)):
            yield SlotBatch(part, starts[part], lengths[part], width)
