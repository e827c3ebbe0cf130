"""`Items`: what is known of the (head, slot) pairs of some layers before anything is merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.errors import ConfigError
from gracekv.tree.context import TreeContext


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """The B = U*J (head, slot) items of some layers of one device, U heads, each with J slots.

    Items are in tree order: head * J + slot, and U runs over the G KV heads of each layer. Nodes
    are given as an item and bounds relative to its slot.

    Attributes:
        tree: int64 [B] forest-wide tree of each item.
        origin: int64 [B] absolute first position of each item's slot.
        length: int64 [B] tokens.
        curvature: kappa [T], or None.
        forced: floor score [U, N] float64 (-inf: no candidate), or None.
        scores: R^tok [U, N] float64.
        sensitivity: omega [U] float64.
        region_start: first compressible position, where `forced` and `scores` start.
        candidates_before: int64 [U, N+1] floor candidates before each token, or None.
        lifts: whether nodes with a candidate are split by lifting it, whatever their distortion.
    """

    tree: Tensor
    origin: Tensor
    length: Tensor
    curvature: Tensor | None
    forced: Tensor | None
    scores: Tensor
    sensitivity: Tensor
    region_start: int
    candidates_before: Tensor | None
    lifts: bool = False

    @classmethod
    def of(cls, context: TreeContext, layers: Sequence[int], lifts: bool = False) -> Items:
        """All items of `layers`, on their device; `lifts` as the refiner does."""
        device = context.prefill.keys[layers[0]].device
        partition, chosen = context.partition, list(layers)
        heads = len(chosen) * context.prefill.kv_heads
        forced = context.forced
        if forced is not None:
            forced = forced[chosen].flatten(0, 1).to(device)
        before = None
        if forced is not None:
            before = torch.nn.functional.pad((forced > -torch.inf).long().cumsum(dim=1), (1, 0))
        # Trees are numbered (layer * G + head) * J + slot.
        per_layer = context.prefill.kv_heads * partition.slots
        first = torch.tensor(chosen, device=device)[:, None] * per_layer
        return cls(
            tree=(first + torch.arange(per_layer, device=device)).flatten(),
            origin=partition.starts.to(device).repeat(heads),
            length=partition.lengths.to(device).repeat(heads),
            curvature=None if context.curvature is None else context.curvature.to(device).double(),
            forced=forced,
            scores=context.scores[chosen].flatten(0, 1).to(device).double(),
            sensitivity=context.sensitivity[chosen].flatten().to(device).double(),
            region_start=partition.region.start,
            candidates_before=before,
            lifts=lifts,
        )

    def head(self, item: Tensor) -> Tensor:
        """int64 [n], as `item` [n]: its row in `forced`, `scores` and `sensitivity`."""
        return item // (len(self.origin) // len(self.scores))

    def offset(self, item: Tensor, token: Tensor) -> Tensor:
        """int64 [...]: place in the region of an item's token (relative to its slot)."""
        return self.origin[item] - self.region_start + token

    def curvatures(self, item: Tensor, token: Tensor) -> Tensor:
        """kappa [V, w] float64 of tokens [V, w] of items [V].

        Raises `ConfigError` if no curvature was computed.
        """
        return self.known_curvature()[self.origin[item][:, None] + token]

    def known_curvature(self) -> Tensor:
        """kappa [T] float64; raises `ConfigError` if none was computed."""
        if self.curvature is None:
            raise ConfigError(
                "This refiner cuts at curvature peaks, but none was computed. Set candidates=0 and "
                "reward=0, or give the trees a curvature."
            )
        return self.curvature

    def floor_scores(self, item: Tensor, token: Tensor) -> Tensor | None:
        """Floor scores [V, w] float64 of tokens [V, w] of items [V]; None without a floor."""
        if self.forced is None:
            return None
        return self.forced[self.head(item)[:, None], self.offset(item[:, None], token)]

    def holds_candidate(self, item: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """bool [V]: intervals [start, end) of items with a floor candidate inside."""
        before = self.candidates_before
        if before is None:
            return torch.zeros_like(item, dtype=torch.bool)
        head, offset = self.head(item), self.offset(item, start)
        return before[head, offset + end - start] > before[head, offset]

    def lifted(self, item: Tensor, start: Tensor, end: Tensor) -> Tensor | None:
        """int64 [V]: which token of a node will be lifted, counted from its start; -1 if open.

        Of such nodes nobody asks for any distortion but that of the two sides. Roots count as open:
        they are asked for their own too. None if all are open.
        """
        if not self.lifts or self.candidates_before is None:
            return None
        inner = (start > 0) | (end < self.length[item])
        rows = torch.nonzero(self.holds_candidate(item, start, end) & inner).flatten()
        if not len(rows):
            return None
        item, start, length = item[rows], start[rows], (end - start)[rows]
        step = torch.arange(int(length.max()), device=item.device)
        scores = self.floor_scores(item, start[:, None] + torch.minimum(step, length[:, None] - 1))
        assert scores is not None  # there are candidates
        lifted = torch.full_like(end, -1)
        lifted[rows] = scores.masked_fill(step >= length[:, None], -torch.inf).argmax(dim=1)
        return lifted

    def worth(self, item: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """R of intervals [start, end) of items, float64 [V]: their tokens' worth, added in order.

        Not a difference of running sums, so that a small node beside a large token keeps its
        digits. Source: Eq. (V6).
        """
        count = end - start
        node = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
        step = torch.arange(len(node), device=count.device) - (count.cumsum(0) - count)[node]
        position = self.offset(item, start)[node] + step
        rows = self.scores[self.head(item)[node], position]
        return torch.segment_reduce(rows, "sum", lengths=count, unsafe=True)

    def price(self, item: Tensor, worth: Tensor) -> Tensor:
        """omega R of nodes, float64 [V]."""
        return self.sensitivity[self.head(item)] * worth
