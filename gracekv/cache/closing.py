"""Closes the gaps that dropped tokens leave between positions, for texts longer than a model's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.cache.entries import CompressedCache
from gracekv.cache.quantised import dequantised
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.kernels.rope import Rope
from gracekv.prefill.model_layers import rotations_up_to
from gracekv.prefill.supported import closable_length


def oldest_position(cache: CompressedCache, shard: HeadShard = WHOLE) -> int:
    """The lowest position of an entry in all processes; above 0 once gaps were closed."""
    # Where nothing was kept, that of the last token.
    every = [torch.tensor([cache.length - 1], device="cpu"), *(x.index()[1] for x in cache.layers)]
    return -int(shard.maximum(-torch.cat(every).amin()))


def with_closed_gaps(
    cache: CompressedCache, model: Any, tokens: int = 0, shard: HeadShard = WHOLE
) -> RaggedCache | None:
    """The cache of one sequence with closed gaps; None while a quarter of positions is left.

    Entries take half of the positions that the model knows, or less where `tokens` do not fit the
    other half. They are then in the model's dtype.

    Args:
        cache: its entries.
        model: knows the rotations; its weights may be on the device "meta".
        tokens: how many are read next.
        shard: the KV heads of this process.
    """
    known, now = closable_length(model), cache.length
    if known is None or 4 * (now - oldest_position(cache, shard) + tokens) <= 3 * known:
        return None
    plain, reach = dequantised(cache), min(known // 2, known - tokens)
    pairs: Any = zip(plain.layers, rotations_up_to(model, now), strict=True)
    return replace(plain, layers=tuple(closed(x, now, y, reach) for x, y in pairs))


def from_zero(cache: RaggedCache, shard: HeadShard = WHOLE) -> RaggedCache:
    """The cache with positions that begin with its oldest entry; keys stay rotated as they are."""
    first = oldest_position(cache, shard)
    layers = tuple(replace(x, positions=x.positions - first) for x in cache.layers)
    return replace(cache, layers=layers, length=cache.length - first)


def closed(entries: RaggedEntries, now: int, rope: Rope, reach: int) -> RaggedEntries:
    """The entries of each head, the first of them at most `reach` positions before `now`.

    Only the longest gaps between a head's entries are shortened, to one length: short distances are
    what many heads look at. A head of more than `reach` entries has no gaps left.

    Args:
        entries: those of one sequence; keys are rotated on from their positions.
        now: position of the next token, to which distances count.
        rope: the layer's rotations, up to `now`.
        reach: number of positions.
    """
    # On the host, where a head's few numbers need no launches.
    at = entries.positions.long().cpu()
    to = torch.cat([_within_reach(own, now, reach) for own in at.split(entries.lengths.tolist())])
    keys = rope.moved(at, to).rotate(entries.keys.float(), None)
    return replace(entries, keys=keys.to(entries.dtype), positions=to.int().to(keys.device))


def _within_reach(positions: Tensor, now: int, reach: int) -> Tensor:
    """Positions [n] of a head whose gaps are shortened for `closed`."""
    if not len(positions):
        return positions
    gaps = torch.cat([positions, positions.new_full((1,), now)]).diff().clamp(min=1)
    rising, counts = gaps.sort().values, torch.arange(len(gaps), 0, -1, device=gaps.device)
    # Where the shortest gaps stay, the others share what they leave of the reach.
    longest = ((reach - rising.cumsum(0) + rising) // counts).max().clamp(min=1)
    return now - gaps.clamp(max=longest).flip(0).cumsum(0).flip(0)
