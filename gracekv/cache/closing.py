"""Closes the position gaps left by dropped tokens, for texts longer than a model's limit."""

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
from gracekv.prefill.length_limits import closable_length
from gracekv.prefill.model_layers import rotations_up_to


def oldest_position(cache: CompressedCache, shard: HeadShard = WHOLE) -> int:
    """The lowest position of an entry over all processes; above 0 after gaps were closed."""
    # If nothing was kept, the position of the last token.
    every = [torch.tensor([cache.length - 1], device="cpu"), *(x.index()[1] for x in cache.layers)]
    return -int(shard.maximum(-torch.cat(every).amin()))


def known_reach(model: Any, positions: str) -> int | None:
    """`closable_length` if positions are "closed", else None."""
    return closable_length(model) if positions == "closed" else None


def free_reach(model: Any, positions: str) -> int | None:
    """The tokens that may be read at once: the quarter of the positions that closing leaves free.

    None if positions are not "closed".
    """
    known = known_reach(model, positions)
    return None if known is None else max(1, known // 4)


def with_closed_gaps(
    cache: CompressedCache, model: Any, tokens: int = 0, shard: HeadShard = WHOLE
) -> RaggedCache | None:
    """The cache of one sequence with closed gaps; None while a quarter of the positions is free.

    Entries take half of the positions that the model knows, or less if `tokens` do not fit in the
    other half. The result is in the model's dtype.

    Args:
        cache: its entries.
        model: provides the rotations; its weights may be on the device "meta".
        tokens: number of tokens to be read next.
        shard: the KV heads of this process.
    """
    limit, length = closable_length(model), cache.length
    if limit is None or 4 * (length - oldest_position(cache, shard) + tokens) <= 3 * limit:
        return None
    plain, reach = dequantised(cache), min(limit // 2, limit - tokens)
    pairs: Any = zip(plain.layers, rotations_up_to(model, length), strict=True)
    return replace(plain, layers=tuple(closed(x, length, y, reach) for x, y in pairs))


def from_zero(cache: RaggedCache, shard: HeadShard = WHOLE) -> RaggedCache:
    """The cache with positions relative to its oldest entry; keys are not rotated."""
    first = oldest_position(cache, shard)
    layers = tuple(replace(x, positions=x.positions - first) for x in cache.layers)
    return replace(cache, layers=layers, length=cache.length - first)


def closed(entries: RaggedEntries, now: int, rope: Rope, reach: int) -> RaggedEntries:
    """The entries of each head, with the first at most `reach` positions before `now`.

    Only the longest gaps between a head's entries are shortened, to a common length, since many
    heads rely on short distances. A head of more than `reach` entries has no gaps left.

    Args:
        entries: those of one sequence; keys are re-rotated from their positions.
        now: position of the next token, from which distances are measured.
        rope: the layer's rotations, up to `now`.
        reach: number of positions.
    """
    # On the host, since a head's few numbers are not worth kernel launches.
    at = entries.positions.long().cpu()
    to = torch.cat([_within_reach(own, now, reach) for own in at.split(entries.lengths.tolist())])
    keys = rope.moved(at, to).rotate(entries.keys.float(), None)
    return replace(entries, keys=keys.to(entries.dtype), positions=to.int().to(keys.device))


def _within_reach(positions: Tensor, now: int, reach: int) -> Tensor:
    """Positions [n] of a head, with gaps shortened for `closed`."""
    if not len(positions):
        return positions
    gaps = torch.cat([positions, positions.new_full((1,), now)]).diff().clamp(min=1)
    rising, counts = gaps.sort().values, torch.arange(len(gaps), 0, -1, device=gaps.device)
    # If the shortest gaps stay, the others share the rest of the reach.
    longest = ((reach - rising.cumsum(0) + rising) // counts).max().clamp(min=1)
    return now - gaps.clamp(max=longest).flip(0).cumsum(0).flip(0)
