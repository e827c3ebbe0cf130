"""`EntryPool`: the best entries of the layers so far, in tensors of a fixed size.

A token that is not among the B best of the layers so far is not among the B best of all layers. So
the tokens of each layer compete with the entries in the pool, and winners overwrite the keys and
values of losers. Nothing is read from the device until all layers have come. Source: ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.allocate.ranking import first_fitting
from gracekv.allocate.selection import Selection
from gracekv.allocate.top_tokens import NEVER, largest
from gracekv.cache.base import RaggedEntries
from gracekv.kernels.ragged import offsets
from gracekv.prefill import CaptureInfo, LayerCapture, Region

# Gain of a token of the region in place of infinity.
_LARGEST = torch.finfo(torch.float64).max


class EntryPool:
    """Keys and values of the `budget` best tokens of a region, and of all tokens outside it.

    Ties go to the earlier layer, head and token. Besides key and value an entry takes 24 bytes: its
    gain, its place (layer, head and token as one number) and its slot, the row of its key and
    value. Entries ascend by place; slots are in no order.

    Args:
        info: facts of the sequence; T tokens, L layers, G heads.
        region: the positions that compete.
        budget: most entries of the region in all heads, those of other processes included.
    """

    def __init__(self, info: CaptureInfo, region: Region, budget: int) -> None:
        self._info, self._budget = info, budget
        # Decoding feeds the last prompt token again, so it is no entry.
        self._covered, self._region = info.spans.length - 1, region
        outside = region.start + max(0, self._covered - region.end)
        self._fixed = info.kv_heads * outside
        self._gain = torch.empty(0, dtype=torch.float64, device=info.device)
        self._place = torch.empty(0, dtype=torch.int64, device=info.device)
        self._slot = self._place
        self._keys = self._values = torch.empty(0, 0, dtype=info.dtype, device=info.device)
        self._devices: list[torch.device] = []
        self._selection: Selection | None = None

    def add(self, capture: LayerCapture, gains: Tensor) -> None:
        """Add the tokens of the next layer, and drop the entries that are no longer the best.

        Args:
            capture: the layer.
            gains: float64 [G, N], gains of the region's tokens, `NEVER` if they may not be kept.
        """
        info, device = self._info, self._info.device
        self._devices.append(capture.keys.device)
        heads, length, known = info.kv_heads, info.spans.length, len(self._place)
        own = torch.full((heads, length), torch.inf, dtype=torch.float64, device=device)
        own[:, self._covered :] = NEVER
        # Only tokens outside the region have infinite gains.
        own[:, self._region.start : self._region.end] = gains.nan_to_num(0.0, posinf=_LARGEST)
        gain = torch.cat([self._gain, own.flatten()])
        first = capture.number * heads * length
        place = torch.arange(first, first + heads * length, device=device)
        place = torch.cat([self._place, place])
        count, gain = self._count(gain, place, known)
        self._reserve(count, own.numel(), capture)

        stays = largest(gain, count)
        reached = stays.cumsum(0)
        before = reached[known - 1] if known else 0
        # New slots, then those of losers, go to the winners in order. All other rows are written
        # to one spare place, so that no size depends on how many win.
        new = count - known
        free = torch.empty(count + 1, dtype=torch.int64, device=device)
        torch.arange(known, count, out=free[:new])
        rank = torch.arange(new, count, device=device) - reached[:known]
        free.scatter_(0, rank.masked_fill_(stays[:known], count), self._slot)
        target = free[reached[known:] - (before + 1)]
        target.masked_fill_(~stays[known:], len(self._keys) - 1)
        for pool, rows in ((self._keys, capture.keys), (self._values, capture.values)):
            pool.index_copy_(0, target, rows.to(device).flatten(0, 1))
        kept = _compacted(torch.arange(len(gain), device=device), stays, count, reached)
        self._gain, self._place = gain[kept], place[kept]
        self._slot = torch.cat([self._slot, target])[kept]

    def _count(self, gain: Tensor, place: Tensor, known: int) -> tuple[int, Tensor]:
        """The number of rows that stay, and the gains [n], `NEVER` where other processes win.

        There are as many rows as slots; rows of gain `NEVER` are empty.
        """
        shard, layers = self._info.shard, len(self._devices)
        limit = self._budget + layers * self._fixed * shard.ranks
        if shard.ranks == 1:
            return min(limit, len(gain)), gain
        at = (gain > NEVER).nonzero().flatten()
        length, heads = self._info.spans.length, self._info.kv_heads
        ties = shard.among_all(place[at] // length, heads) * length + place[at] % length
        fits = first_fitting(gain[at], ties, torch.ones_like(at), limit, shard)
        gain = torch.full_like(gain, NEVER).index_copy_(0, at, torch.where(fits, gain[at], NEVER))
        return max(known, int(fits.sum())), gain

    def _reserve(self, count: int, new: int, capture: LayerCapture) -> None:
        """Make room for `count` entries and a spare slot."""
        if count < len(self._keys):
            return
        shard, layers = self._info.shard, self._info.layers
        size = min(self._budget // shard.ranks + layers * self._fixed, layers * new)
        size = max(size, count, 2 * len(self._keys) if len(self._keys) else 0) + 1
        for name, like in (("_keys", capture.keys), ("_values", capture.values)):
            held: Tensor = getattr(self, name)
            made = held.new_empty(size, like.shape[-1])
            if len(held):
                made[: len(held)] = held
            setattr(self, name, made)

    def selection(self) -> Selection:
        """The entries of the region. The first call waits for the device, once."""
        if self._selection is None:
            info, length = self._info, self._info.spans.length
            counts = self._per_head(self._gain > NEVER)
            total = int(counts.sum())
            valid = self._gain > NEVER
            self._gain, self._place, self._slot = (
                _compacted(x, valid, total) for x in (self._gain, self._place, self._slot)
            )
            counts -= self._fixed // info.kv_heads
            position = (self._place % length).to(torch.int32)
            start = _compacted(position, self._inside(position), int(counts.sum()))
            bounds = (self._region.start, self._region.end)
            self._selection = Selection(info.layers, info.kv_heads, bounds, offsets(counts), start)
        return self._selection

    def _inside(self, position: Tensor) -> Tensor:
        """bool [n], as `position` [n]: which of them lie in the region."""
        return (position >= self._region.start) & (position < self._region.end)

    def _per_head(self, mask: Tensor) -> Tensor:
        """int64 [L*G] on the CPU: how many rows of each head `mask` (bool, a row each) holds."""
        counts = torch.zeros(
            self._info.layers * self._info.kv_heads, dtype=torch.int64, device=mask.device
        )
        return counts.index_add_(0, self._place // self._info.spans.length, mask.long()).cpu()

    def utility(self) -> float:
        """Summed gains of the region's entries."""
        inside = self._inside(self._place % self._info.spans.length)
        return float(_compacted(self._gain, inside, self.selection().entries).sum())

    def pop(self, chosen: Selection) -> list[tuple[RaggedEntries, Tensor]]:
        """The packed entries of each layer: those `chosen`, and all tokens outside the region.

        Called once: it frees the pool.

        Args:
            chosen: entries of `selection()`.

        Returns:
            For each layer its E entries, and int64 [E], which of the chosen each is; -1: none.
        """
        info, length = self._info, self._info.spans.length
        own, position = self.selection(), self._place % length
        inside = self._inside(position)
        if chosen is not own:
            wanted = chosen.head_of_entry().to(self._place.device) * length + chosen.start
            at = torch.searchsorted(self._place, wanted)
            outside, inside = ~inside, torch.zeros_like(inside).index_fill_(0, at, True)
        else:
            outside = ~inside
        selected = torch.where(inside, inside.cumsum(0) - 1, -1)
        # Decoding feeds the last prompt token again, so it is no entry.
        stays = (inside | outside) & (position < self._covered)
        counts = self._per_head(stays)
        total = int(counts.sum())
        slot = _compacted(self._slot, stays, total)
        position = _compacted(position.to(torch.int32), stays, total)
        selected = _compacted(selected, stays, total)
        # One after the other, so that no more than half of the pool is held twice.
        keys, self._keys = self._keys.index_select(0, slot), self._keys[:0].clone()
        values, self._values = self._values.index_select(0, slot), self._values[:0].clone()
        sizes = counts.view(info.layers, info.kv_heads)
        columns = (keys, values, position, selected)
        split = zip(*(x.split(sizes.sum(1).tolist()) for x in columns), strict=True)
        layers = []
        for device, heads, parts in zip(self._devices, sizes, split, strict=True):
            own_keys, own_values, positions, index = (x.to(device) for x in parts)
            mass = torch.zeros(len(index), dtype=torch.float32, device=device)
            entries = RaggedEntries(own_keys, own_values, positions, mass, offsets(heads))
            layers.append((entries, index))
        return layers


def _compacted(values: Tensor, mask: Tensor, count: int, reached: Tensor | None = None) -> Tensor:
    """The `count` of `values` [n] where `mask` (bool [n]) holds, without waiting for the device.

    `reached` is the running sum of `mask`, if it is known.
    """
    place = (mask.cumsum(0) if reached is None else reached) - 1
    return values.new_empty(count + 1).scatter_(0, place.masked_fill_(~mask, count), values)[:count]
