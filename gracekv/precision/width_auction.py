"""The width of each entry, from one auction over the entries of all layers and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.allocate.ranking import affordable, buy_in_turn
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.kernels import ragged
from gracekv.kernels.uploads import upload
from gracekv.precision.base import EXACT
from gracekv.precision.uniform import UniformPrecision
from gracekv.prefill import CaptureInfo

_NEVER = -1.0


@dataclass(frozen=True, slots=True)
class WidthCosts:
    """Bytes of entries at each of W widths, in ascending order.

    Attributes:
        bits: W widths, without the 0 of dropped entries.
        entry: W numbers, bytes of an entry at that width.
        block: W numbers, bytes shared by a block of entries of that width.
        per_block: entries in a block; the last one of a head may have fewer.
    """

    bits: tuple[int, ...]
    entry: tuple[int, ...]
    block: tuple[int, ...]
    per_block: int

    @classmethod
    def of(cls, stored: Sequence[UniformPrecision], info: CaptureInfo) -> WidthCosts:
        """Costs of the widths of `stored`, ascending and with one group size, and of `EXACT`."""
        shape = (info.entry_dim, info.dtype.itemsize, info.spans)
        costs = [width.entry_bytes(*shape) for width in stored]
        return cls(
            bits=(*(width.bits for width in stored), EXACT),
            entry=(*(width.coded for width in costs), costs[0].exact),
            block=(*(width.block for width in costs), 0),
            per_block=stored[0].group,
        )

    def mean(self) -> Tensor:
        """float64 [W], bytes of an entry with its share of a full block."""
        shared = torch.tensor(self.block, dtype=torch.float64) / self.per_block
        return torch.tensor(self.entry, dtype=torch.float64) + shared


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """E entries that compete for bytes, head after head; on one device except `loss`.

    Attributes:
        worth: float64 [E], the loss if an entry is dropped; at least 0.
        head: int64 [E], ascending.
        loss: float64 [H, W] on the CPU, the share of an entry's worth that each width loses, per
            head.
        fixed: bool [E], entries that may only be dropped or get the last width.
        place: int64 [E], ascending: their order among those of all processes, or None if these are
            all.
    """

    worth: Tensor
    head: Tensor
    loss: Tensor
    fixed: Tensor
    place: Tensor | None = None


def allocated_widths(
    entries: Entries, costs: WidthCosts, budget: int, shard: HeadShard = WHOLE
) -> Tensor:
    """int64 [E] on the CPU: 0 for dropped entries, else 1 + the index of the width in `costs.bits`.

    An operation gives an entry its first or its next width. Operations are bought by descending
    gain per byte until one does not fit; then, repeatedly, the first in this order that still fits.
    So `budget` is never exceeded, and no operation fits in the rest. A gain is worth times the
    saved loss, and bytes include a share of a full block. Operations that together gain more per
    byte than the first one alone are ranked by their joint gain. Ties go to the earlier entry. The
    real cost of an operation depends on the blocks of its head: it may start one or empty another.

    If heads are sharded over processes, all of them share `budget`. They find its end by cuts, then
    buy one operation per round.

    Source: ours; see `gracekv.precision.reference.allocated_widths`.
    """
    operation = _Operations.of(entries, costs)
    change = operation.bytes(entries, costs)
    bought, spare = affordable(operation.rate, operation.tie, change, max(0, budget), shard)
    level = torch.zeros_like(entries.head)
    level.scatter_reduce_(0, operation.entry[:bought], operation.target[:bought], "amax")
    # The rest is bought one by one, so on the CPU; head and level of an entry, or an operation, are
    # packed into one number, since copies from a GPU are slow.
    rest = (operation.entry << 16 | operation.source << 8 | operation.target)[bought:]
    packed = torch.cat([entries.head << 8 | level, rest]).cpu()
    levels, rest = packed[: len(level)], packed[len(level) :]
    # The order is only needed with several processes.
    rate, tie = (x[bought:] if shard.ranks > 1 else rest for x in (operation.rate, operation.tie))
    head, level = levels >> 8, levels & 255
    entry, source, target = rest >> 16, rest >> 8 & 255, rest & 255
    # `steps` numbers a head's levels, of which the lowest is dropped.
    of_operation, steps = head[entry], len(costs.bits) + 1
    heads = len(entries.loss)
    counts = torch.bincount(head * steps + level, minlength=heads * steps).view(heads, steps)
    # Costs follow from head, level before and level after.
    kind = (of_operation * steps + source) * steps + target
    waiting, at = level[entry] == source, 0

    def first(left: int) -> tuple[float, int, int] | None:
        nonlocal at
        cost = _change(counts, costs).flatten()
        fits = (waiting & (cost <= left)[kind]).nonzero()
        if not len(fits):
            return None
        at = int(fits[0])
        return float(rate[at]), int(tie[at]), int(cost[kind[at]])

    def buy() -> None:
        level[entry[at]] = target[at]
        counts[of_operation[at], source[at]] -= 1
        counts[of_operation[at], target[at]] += 1
        same = entry == entry[at]
        waiting[same] = source[same] == target[at]

    buy_in_turn(first, buy, spare, shard)
    return level


def _change(counts: Tensor, costs: WidthCosts) -> Tensor:
    """int64 [H, W + 1, W + 1]: bytes that a head gains if one entry goes from level i to level j.

    `counts` int64 [H, W + 1] says how many of a head's entries are at each level.
    """
    price, block = torch.tensor((0, *costs.entry)), torch.tensor((0, *costs.block))
    blocks, fewer, more = (ragged.blocks(counts + x, costs.per_block) for x in (0, -1, 1))
    paid, freed = price + block * (more - blocks), price + block * (blocks - fewer)
    return paid[:, None] - freed[:, :, None]


def widths_by_head(entries: Entries, costs: WidthCosts, budget: int) -> Tensor:
    """int64 [E] like `allocated_widths`, where each head has its own `budget`.

    In each head, operations are bought by descending gain per bit of a number, regardless of their
    bytes, until one does not fit. These widths minimise worth times loss plus price times bits, at
    the lowest price per bit at which they fit. Ties go to the earlier entry.

    Source: Zhang et al. (2026), RDKV, arXiv:2605.08317; see
    `gracekv.precision.reference.widths_at_a_price`.
    """
    in_bits = WidthCosts(costs.bits, costs.bits, block=(0,) * len(costs.bits), per_block=1)
    operation = _Operations.of(entries, in_bits)
    by_head, first = _by_head(entries.head[operation.entry], len(entries.loss))
    spent = _running(operation.bytes(entries, costs)[by_head], first)
    bought = by_head[_running((spent > budget).long(), first) == 0]
    level = torch.zeros_like(entries.head)
    return level.scatter_reduce(0, operation.entry[bought], operation.target[bought], "amax")


def _by_head(head: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Sort operations by `head` int64 [M]; returns the order and where each one's head starts."""
    ordered = head.sort(stable=True)
    # Not bincount, which synchronises with the GPU.
    counts = head.new_zeros(heads).index_add_(0, head, torch.ones_like(head))
    return ordered.indices, ragged.offsets(counts)[ordered.values]


def _running(x: Tensor, first: Tensor) -> Tensor:
    """int64 [M]: the sums of `x` int64 [M] from `first` up to each element."""
    sums = ragged.offsets(x)
    return sums[1:] - sums[first]


@dataclass(frozen=True, slots=True, eq=False)
class _Operations:
    """M operations in the order in which they are bought.

    Attributes:
        entry: int64 [M].
        source: int64 [M], the level before; 0 for a dropped entry.
        target: int64 [M], the level after.
        rate: float64 [M], descending: loss saved per byte.
        tie: int64 [M], their order among equal rates.
    """

    entry: Tensor
    source: Tensor
    target: Tensor
    rate: Tensor
    tie: Tensor

    @classmethod
    def of(cls, entries: Entries, costs: WidthCosts) -> _Operations:
        widths = len(costs.bits)
        device, fixed = entries.worth.device, entries.fixed
        by_head = upload(rates(entries.loss, costs), device)
        rate = torch.where(fixed[:, None], _NEVER, entries.worth[:, None] * by_head[entries.head])
        rate[:, -1] = torch.where(fixed, entries.worth / float(costs.entry[-1]), rate[:, -1])
        falling = rate.flatten().sort(descending=True, stable=True)
        # Steps that are never offered come last.
        offered = rate.numel() - (widths - 1) * int(fixed.sum())
        order = falling.indices[:offered]
        entry, target = order // widths, order % widths + 1
        place = entry if entries.place is None else entries.place[entry]
        source = torch.where(fixed[entry], 0, target - 1)
        return cls(entry, source, target, falling.values[:offered], place * widths + target - 1)

    def bytes(self, entries: Entries, costs: WidthCosts) -> Tensor:
        """int64 [M]: the cost of each operation after all operations before it."""
        price = upload(torch.tensor((0, *costs.entry)), self.entry.device)
        change = price[self.target] - price[self.source]
        by_head, first = _by_head(entries.head[self.entry], len(entries.loss))
        for width, block in enumerate(costs.block, start=1):
            if block:
                step = ((self.target == width).long() - (self.source == width).long())[by_head]
                count = _running(step, first)
                now, before = (ragged.blocks(x, costs.per_block) for x in (count, count - step))
                change[by_head] += block * (now - before)
        return change


def rates(loss: Tensor, costs: WidthCosts) -> Tensor:
    """float64 [H, W]: loss saved per byte by each step to the next width, for a worth of 1.

    The slopes of the smallest concave function above the saved loss: they never increase, so steps
    stay in order. A wider step that takes no more bytes, as with tiny groups, counts as one byte.
    `loss` is float64 [H, W].
    """
    bytes_ = torch.nn.functional.pad(costs.mean(), (1, 0))
    lost = torch.nn.functional.pad(loss.clamp(0, 1), (1, 0), value=1.0)
    # [H, start, end]: the slopes of the chords between all pairs of widths.
    chords = (lost[:, :, None] - lost[:, None]) / (bytes_ - bytes_[:, None]).clamp(min=1)
    # Of all chords across a step: the steepest from each start, and the flattest of these.
    slopes = [chords[:, :step, step:].amax(dim=2).amin(dim=1) for step in range(1, len(bytes_))]
    return torch.stack(slopes, dim=1).clamp_(min=0)
