"""`IntervalTable` (D of every sub-interval of every slot of a layer) and what fills it."""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.errors import ConfigError
from gracekv.prefill import Needs
from gracekv.registry import Registry, Strategy
from gracekv.tree.context import SlotBatch, TreeContext
from gracekv.tree.workspace import Workspace


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
class TablePart:
    """A batch of S slots of one length in U heads (of one or more layers); B = U*S items.

    Items are head-major.

    Attributes:
        batch: the slots.
        distortion: D [B, E] float32 of every interval of n tokens, columns as in
            `interval_index`; exactly 0 for single tokens. Intervals of padding hold anything.
        drop: D^drop [B] float32 of the whole slot.
        mass: [B, n or 1, n] float32: mean normalised probe mass of token t (last axis) over the
            probes that see token j (middle axis; one row if that does not depend on j).
    """

    batch: SlotBatch
    distortion: Tensor
    drop: Tensor
    mass: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class IntervalTable:
    """What refinement may ask about the B = U*J (head, slot) items of some consecutive layers.

    U heads are the G KV heads of each layer, and items are in tree order: head * J + slot.
    Attributes are flat, slots of any length side by side; ask through the methods.

    Attributes:
        origin: int64 [B] absolute first position of each item's slot.
        length: int64 [B] tokens.
        drop: D^drop [B] float32.
        curvature: kappa [T], or None.
        forced: floor score [U, N] float64 (-inf: no candidate), or None.
        tokens: R^tok [U, N] float64.
        sensitivity: omega [U] float64.
        start_of_region: first compressible position, where `forced` and `tokens` start.
    """

    origin: Tensor
    length: Tensor
    drop: Tensor
    curvature: Tensor | None
    forced: Tensor | None
    tokens: Tensor
    sensitivity: Tensor
    start_of_region: int
    _distortion: Tensor
    _distortion_base: Tensor
    _mass: Tensor
    _mass_base: Tensor
    _mass_rows: Tensor
    _mass_width: Tensor
    _candidates_before: Tensor | None

    @classmethod
    def of_parts(
        cls, context: TreeContext, layers: Sequence[int], parts: Sequence[TablePart]
    ) -> IntervalTable:
        """Join the parts that together hold every slot of every head of `layers` once."""
        heads, slots = len(layers) * context.prefill.kv_heads, context.partition.slots
        columns: dict[str, list[Tensor]] = defaultdict(list)
        base = mass_base = 0
        for part in parts:
            items, width = part.distortion.shape
            rows, n = part.mass.shape[1:]
            step = torch.arange(items, device=part.drop.device)
            head = torch.arange(heads, device=part.drop.device)[:, None]
            columns["item"].append((head * slots + part.batch.slots).flatten())
            columns["origin"].append(part.batch.starts.repeat(heads))
            columns["length"].append(torch.full_like(step, part.batch.n))
            columns["distortion_base"].append(base + step * width)
            columns["mass_base"].append(mass_base + step * rows * n)
            columns["mass_rows"].append(torch.full_like(step, rows))
            columns["mass_width"].append(torch.full_like(step, n))
            base, mass_base = base + items * width, mass_base + items * rows * n
        joined = {name: torch.cat(column) for name, column in columns.items()}
        order = joined["item"].argsort()
        forced = context.forced
        if forced is not None:
            forced = forced[list(layers)].flatten(0, 1).to(order.device)
        return cls(
            origin=joined["origin"][order],
            length=joined["length"][order],
            drop=torch.cat([part.drop for part in parts])[order],
            curvature=(None if context.curvature is None else context.curvature.to(order.device)),
            forced=forced,
            tokens=context.tokens[list(layers)].flatten(0, 1).to(order.device).double(),
            sensitivity=context.sensitivity[list(layers)].flatten().to(order.device).double(),
            start_of_region=context.partition.region.start,
            # Gains are compared in float64; converted here once, not at every look-up.
            _distortion=torch.cat([part.distortion.flatten() for part in parts]).double(),
            _distortion_base=joined["distortion_base"][order],
            _mass=torch.cat([part.mass.flatten() for part in parts]).double(),
            _mass_base=joined["mass_base"][order],
            _mass_rows=joined["mass_rows"][order],
            _mass_width=joined["mass_width"][order],
            _candidates_before=None if forced is None else _counts_before(forced),
        )

    def at(self, item: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """D of intervals [start, end) (relative to the slot) of items, float64; broadcasts."""
        return self._distortion[self._distortion_base[item] + interval_index(start, end)]

    def masses(self, item: Tensor, end: Tensor, token: Tensor) -> Tensor:
        """Mass of tokens [V, w] by the probes that see all of [.., end), float64; item, end [V]."""
        row = torch.minimum(end, self._mass_rows[item]) - 1
        base = self._mass_base[item] + row * self._mass_width[item]
        return self._mass[base[:, None] + token]

    def curvatures(self, item: Tensor, token: Tensor) -> Tensor:
        """kappa [V, w] float64 of tokens [V, w] of items [V]."""
        if self.curvature is None:
            raise ConfigError(
                "This refiner cuts at curvature peaks, but none was computed. Set candidates=0 and "
                "reward=0, or give the trees a curvature."
            )
        return self.curvature[self.origin[item][:, None] + token].double()

    def floor_scores(self, item: Tensor, token: Tensor) -> Tensor | None:
        """Floor scores [V, w] float64 of tokens [V, w] of items [V]; None without a floor."""
        if self.forced is None:
            return None
        position = self.origin[item][:, None] + token - self.start_of_region
        return self.forced[self.head(item)[:, None], position]

    def holds_candidate(self, item: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """bool [V]: intervals [start, end) of items with a floor candidate inside."""
        before = self._candidates_before
        if before is None:
            return torch.zeros_like(item, dtype=torch.bool)
        head, offset = self.head(item), self.origin[item] - self.start_of_region
        return before[head, offset + end] > before[head, offset + start]

    def head(self, item: Tensor) -> Tensor:
        """int64, as `item`: its row in `forced`, `tokens` and `sensitivity`."""
        return item // (len(self.origin) // len(self.tokens))

    def worth(self, item: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """R of intervals [start, end) of items, float64 [V]: their tokens' worth, added in order.

        Not a difference of running sums, so that a small node beside a large token keeps its
        digits. Source: the paper, Eq. app_bottom_up_value.
        """
        count = end - start
        node = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
        step = torch.arange(len(node), device=count.device) - (count.cumsum(0) - count)[node]
        position = (self.origin[item] + start - self.start_of_region)[node] + step
        rows = self.tokens[self.head(item)[node], position]
        return torch.segment_reduce(rows, "sum", lengths=count, unsafe=True)


def _counts_before(forced: Tensor) -> Tensor:
    """int64 [U, N+1]: floor candidates before each position, from scores [U, N]."""
    return torch.nn.functional.pad((forced > -torch.inf).long().cumsum(dim=1), (1, 0))


class Distortion(Strategy, abc.ABC):
    """How much is lost when an interval is stored as one entry, or not at all.

    Pure and deterministic, float32 or better. D of a single token is exactly 0.
    """

    @abc.abstractmethod
    def parts(
        self, context: TreeContext, layers: Sequence[int], space: Workspace
    ) -> Iterator[TablePart]:
        """Parts that together hold every slot of every head of `layers` once.

        The layers are consecutive and on one device. `space` lends scratch memory there; no part
        may keep any of it.
        """

    def table(
        self, context: TreeContext, layers: Sequence[int], space: Workspace | None = None
    ) -> IntervalTable:
        """All of `layers`; pass one `space` for all tables of a device."""
        space = space or Workspace(context.prefill.keys[layers[0]].device)
        return IntervalTable.of_parts(context, layers, list(self.parts(context, layers, space)))

    def needs(self) -> Needs:
        """What the prefill must have captured."""
        return Needs()


DISTORTIONS: Registry[Distortion] = Registry("distortion", "what merging or dropping tokens costs")
Distortion.registry = DISTORTIONS
