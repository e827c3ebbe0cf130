"""`IntervalTable` (D of every sub-interval of a batch of slots) and the interface that fills it."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.prefill import Needs
from gracekv.registry import Registry, Strategy
from gracekv.tree.context import SlotBatch, TreeContext


def interval_index(start: Tensor, end: Tensor) -> Tensor:
    """Column of interval [start, end) in an interval list: by last token, then by first token.

    Intervals that end at token j are contiguous and hold every start <= j, so the list of a slot
    of n tokens begins the list of any longer slot. int64 in, int64 out.
    """
    last = end - 1
    return last * (last + 1) // 2 + start


def interval_list(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last token, int64 [E] each, of all E = n(n+1)/2 intervals of n tokens."""
    steps = torch.arange(1, n + 1, device=device)
    last = torch.repeat_interleave(steps - 1, steps)
    first = torch.arange(len(last), device=device) - last * (last + 1) // 2
    return first, last


@dataclass(frozen=True, slots=True, eq=False)
class IntervalTable:
    """What refinement may ask about a batch of S slots in G heads; B = G*S items, head-major.

    Attributes:
        batch: the slots.
        distortion: D [B, E] float32 of every interval, columns as in `interval_index`; exactly 0
            for single tokens.
        drop: D^drop [B] float32 of the whole slot.
        mass: [B, n or 1, n] float32: mean normalised probe mass of token t (last axis) over the
            probes that see token j (middle axis; one row if that does not depend on j).
        curvature: kappa [S, n], or None.
        forced: floor score [B, n] float64 (-inf: no candidate), or None.
    """

    batch: SlotBatch
    distortion: Tensor
    drop: Tensor
    mass: Tensor
    curvature: Tensor | None = None
    forced: Tensor | None = None

    def at(self, item: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """D of intervals [start, end) (relative to the slot) of items; shapes broadcast."""
        return self.distortion[item, interval_index(start, end)]

    def masses(self, item: Tensor, end: Tensor) -> Tensor:
        """[V, n] mass of each token as judged by the probes that see all of [.., end)."""
        row = (end - 1).clamp(max=self.mass.shape[1] - 1)
        return self.mass[item, row]


class Distortion(Strategy, abc.ABC):
    """How much is lost when an interval is stored as one entry, or not at all.

    Pure and deterministic, float32 or better. D of a single token is exactly 0.
    """

    @abc.abstractmethod
    def tables(self, context: TreeContext, layer: int) -> Iterator[IntervalTable]:
        """Tables that together hold every slot of `layer` once, in bounded memory."""

    def needs(self) -> Needs:
        """What the prefill must have captured."""
        return Needs()


DISTORTIONS: Registry[Distortion] = Registry("distortion", "what merging or dropping tokens costs")
Distortion.registry = DISTORTIONS


def fields_of_batch(
    context: TreeContext, layer: int, batch: SlotBatch
) -> tuple[Tensor | None, Tensor | None]:
    """The batch's curvature [S, n] and forced scores [B, n], where the context has them."""
    origin = context.partition.region.start
    offsets = batch.offsets(origin)
    curvature = context.curvature
    if curvature is not None:
        curvature = curvature.to(offsets.device)[offsets + origin]
    forced = context.layer_of(context.forced, layer)
    if forced is not None:
        forced = forced[:, offsets].flatten(0, 1)
    return curvature, forced
