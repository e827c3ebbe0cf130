"""`EntryPool`: the best entries of the layers so far, in tensors of fixed size.

A token that is not among the B best of the layers so far is not among the B best of all layers. So
the tokens of each layer compete with the entries in the pool, and winners overwrite the keys and
values of losers. There is no synchronisation until all layers have been added. Source: ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.allocate.ranking import first_fitting
from gracekv.allocate.selection import Selection
from gracekv.allocate.top_tokens import NEVER, largest
from gracekv.cache.base import RaggedEntries
from gracekv.kernels.ragged import offsets
from gracekv.kernels.uploads import upload
from gracekv.prefill import CaptureInfo, LayerCapture, Region

# Replaces an infinite gain of a token in the region.
_LARGEST = torch.finfo(torch.float64).max


class EntryPool:
    """Keys and values of the `budget` best tokens of a region, and of all tokens outside it.

    Ties go to the earlier layer, head and token. In addition to key and value an entry takes 24
    bytes: its gain, its place (layer, head and token as one number) and its slot, the row of its
    key and value. Entries are sorted by place; slots are not sorted.

    Args:
        info: metadata of the sequence; T tokens, L layers, G heads.
        region: the positions that compete.
        budget: maximum entries of the region in all heads, including those of other processes.
    """

    def __init__(self, info: CaptureInfo, region: Region, budget: int) -> None:
        self._info, self._budget = info, budget
        # Decoding feeds the last prompt token again, so it is not an entry.
        self._covered, self._region = info.spans.length - 1, region
        # The places of a `Past` are not tokens of the prompt.
        self._first = info.spans.past
        outside = region.start - self._first + max(0, self._covered - region.end)
        self._fixed = info.kv_heads * outside
        # Rows of gains (float64 bit patterns), places and slots, for the entries and for the next
        # layer's tokens. Only tokens outside the region have infinite gains.
        self._entries = torch.empty(3, 0, dtype=torch.int64, device=info.device)
        self._length = info.spans.length - self._first
        self._tokens = self._entries.new_empty(3, info.kv_heads * self._length)
        own = _gains(self._tokens).view(info.kv_heads, -1)
        own.fill_(torch.inf)[:, self._covered - self._first :] = NEVER
        torch.arange(-own.numel(), 0, out=self._tokens[1])
        self._keys = self._values = torch.empty(0, 0, dtype=info.dtype, device=info.device)
        self._ranks = self._entries[0]
        self._devices: list[torch.device] = []
        self._selection: Selection | None = None

    def add(self, capture: LayerCapture, gains: Tensor) -> None:
        """Add the tokens of the next layer and drop entries that are no longer among the best.

        Args:
            capture: the layer.
            gains: float64 [G, N], gains of the region's tokens, `NEVER` if they may not be kept.
        """
        self._devices.append(capture.keys.device)
        pooled, tokens = self._entries.shape[1], self._tokens.shape[1]
        scores = _gains(self._tokens).view(len(gains), -1)
        scores = scores[:, self._region.start - self._first : self._region.end - self._first]
        torch.nan_to_num(gains.to(scores.device), 0.0, posinf=_LARGEST, out=scores)
        self._tokens[1].add_(tokens)
        rows = torch.cat([self._entries, self._tokens], dim=1)
        count = self._count(rows, pooled)
        self._reserve(count, tokens, capture)

        stays = largest(_gains(rows), count)
        reached = stays.cumsum(0)
        # Winners, the last first, take new slots and then those of dropped entries, so these fill
        # `free` from its end. All other tokens are written to one spare slot, so that no size
        # depends on the data.
        new, ranks = count - pooled, self._ranks
        spare, free = ranks[len(self._keys) - 1], ranks.new_empty(count + 1)
        free[pooled + 1 :] = ranks[pooled:count]
        loser = (reached[:pooled] - ranks[new + 1 : count + 1]).masked_fill_(stays[:pooled], 0)
        free[loser] = self._entries[2]
        torch.where(stays[pooled:], free[reached[pooled:]], spare, out=rows[2, pooled:])
        for pool, states in ((self._keys, capture.keys), (self._values, capture.values)):
            source = states[:, self._first :].to(pool.device).flatten(0, 1)
            # A GPU moves 16 bytes as fast as one small number.
            many = 16 // pool.element_size()
            if pool.shape[1] % many == source.storage_offset() % many == 0:
                pool, source = (x.contiguous().view(torch.complex128) for x in (pool, source))
            pool.index_copy_(0, rows[2, pooled:], source)
        # Losers are written to an extra place before the first.
        place = (reached * stays).expand(3, -1)
        self._entries = rows.new_empty(3, count + 1).scatter_(1, place, rows)[:, 1:]

    def _count(self, rows: Tensor, pooled: int) -> int:
        """The number of `rows` [3, n] that stay; gains become `NEVER` if other processes win.

        There are as many rows as slots; rows with a gain of `NEVER` are empty.
        """
        shard, gain = self._info.shard, _gains(rows)
        limit = self._budget + len(self._devices) * self._fixed * shard.ranks
        if shard.ranks == 1:
            return min(limit, len(gain))
        at = (gain > NEVER).nonzero().flatten()
        ties = shard.among_all(rows[1, at], self._info.kv_heads * self._length)
        fits = first_fitting(gain[at], ties, torch.ones_like(at), limit, shard)
        gain.index_fill_(0, at[~fits], NEVER)
        return max(pooled, int(fits.sum()))

    def _reserve(self, count: int, new: int, capture: LayerCapture) -> None:
        """Make room for `count` entries and a spare slot."""
        if count < len(self._keys):
            return
        shard, layers = self._info.shard, self._info.layers
        size = min(self._budget // shard.ranks + layers * self._fixed, layers * new)
        size = max(size, count, 2 * len(self._keys)) + 1
        for name, like in (("_keys", capture.keys), ("_values", capture.values)):
            old: Tensor = getattr(self, name)
            buffer = old.new_empty(size, like.shape[-1])
            if len(old):
                buffer[: len(old)] = old
            setattr(self, name, buffer)
        self._ranks = torch.arange(size + new, device=self._info.device)

    def selection(self) -> Selection:
        """The entries of the region. The first call synchronises with the device once."""
        if self._selection is None:
            info = self._info
            valid = _gains(self._entries) > NEVER
            counts = self._per_head(valid)
            self._entries = self._entries[:, _where(valid, int(counts.sum()), self._ranks)]
            counts -= self._fixed // info.kv_heads
            position = self._position()
            inside = _where(self._inside(position), int(counts.sum()), self._ranks)
            kept = offsets(counts), position[inside].to(torch.int32)
            region = self._region.start, self._region.end
            self._selection = Selection(info.layers, info.kv_heads, region, *kept)
        return self._selection

    def _position(self) -> Tensor:
        """int64 [n]: the position of each entry."""
        return self._entries[1] % self._length + self._first

    def _inside(self, position: Tensor) -> Tensor:
        """bool [n]: which of `position` [n] are in the region."""
        return (position >= self._region.start) & (position < self._region.end)

    def _per_head(self, mask: Tensor) -> Tensor:
        """int64 [L*G] on the CPU: number of entries of each head in `mask` (bool [n])."""
        head = self._entries[1] // self._length
        counts = head.new_zeros(self._info.layers * self._info.kv_heads)
        return counts.index_add_(0, head, mask.long()).cpu()

    def utility(self) -> float:
        """Sum of the gains of the region's entries."""
        count = self.selection().entries
        inside = self._inside(self._position())
        return float(_gains(self._entries)[_where(inside, count, self._ranks)].sum())

    def pop(self, selection: Selection) -> list[tuple[RaggedEntries, Tensor]]:
        """The packed entries of each layer: those of `selection` and all tokens outside the region.

        Called once: it frees the pool.

        Args:
            selection: entries of `selection()`.

        Returns:
            For each layer its E entries, and int64 [E], their indices in `selection`, or -1.
        """
        info, length, pooled, ranks = self._info, self._length, self.selection(), self._ranks
        place, slot = self._entries[1:]
        position = self._position()
        inside = self._inside(position)
        stays = position < self._covered
        if selection is not pooled:
            head = upload(selection.head_of_entry(), place.device)
            targets = head * length + selection.start - self._first
            outside, inside = ~inside, torch.zeros_like(inside)
            inside.index_fill_(0, torch.searchsorted(place, targets), True)
            stays &= inside | outside
        if selection is pooled and self._region.end <= self._covered:
            counts, stay = pooled.offsets.diff() + self._fixed // info.kv_heads, ranks[: len(slot)]
        else:
            counts = self._per_head(stays)
            stay = _where(stays, int(counts.sum()), ranks)
        selected = torch.where(inside, inside.cumsum(0) - 1, -1)[stay]
        slot, position = slot[stay], position[stay].to(torch.int32)
        # One after the other, so that at most half of the pool is held twice.
        keys, self._keys = self._keys.index_select(0, slot), self._keys[:0].clone()
        values, self._values = self._values.index_select(0, slot), self._values[:0].clone()
        mass = torch.zeros_like(slot, dtype=torch.float32)
        sizes = counts.view(info.layers, info.kv_heads)
        columns = (keys, values, position, mass, selected)
        split = zip(*(x.split(sizes.sum(1).tolist()) for x in columns), strict=True)
        # If layers are on several devices, none keeps the entries of the others.
        layers, several = [], len(set(self._devices)) > 1
        for device, heads, parts in zip(self._devices, sizes, split, strict=True):
            keys, values, place, mass, index = (x.to(device, copy=several) for x in parts)
            layers.append((RaggedEntries(keys, values, place, mass, offsets(heads)), index))
        return layers


def _gains(rows: Tensor) -> Tensor:
    """float64 [n], a view: the gains in `rows` [3, n] of entries or tokens."""
    return rows[0].view(torch.float64)


def _where(mask: Tensor, count: int, ranks: Tensor) -> Tensor:
    """int64 [count]: the `count` indices where `mask` (bool [n]) is True, without synchronising.

    `ranks` are 0, 1, 2, ... at least to n - 1.
    """
    # All others are written to an extra place before the first.
    return ranks.new_empty(count + 1).scatter_(0, mask.cumsum(0) * mask, ranks[: len(mask)])[1:]
