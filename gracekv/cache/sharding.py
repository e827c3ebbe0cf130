"""A packed cache whose heads lie in several processes, gathered to one, and cut into parts."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache, RaggedLayer
from gracekv.cache.entries import CompressedCache
from gracekv.distributed.head_shard import HeadShard
from gracekv.errors import CacheError
from gracekv.ragged import offsets, rows_and_steps

_PARTS = ("keys", "values", "positions", "log_multiplicity")


def whole_cache(cache: CompressedCache, shard: HeadShard) -> RaggedCache:
    """The cache of all heads, on the CPU; all processes call this together.

    One layer of all processes is held beside the result.
    """
    layers = tuple(_whole_layer(layer, shard) for layer in _plain(cache))
    return RaggedCache(layers, cache.length, cache.padding)


def own_cache(cache: CompressedCache, shard: HeadShard) -> RaggedCache:
    """The part of a cache of all heads that belongs to this process.

    Raises `CacheError` if the heads cannot be divided among the processes.
    """
    layers = tuple(_own_layer(layer, shard) for layer in _plain(cache))
    return RaggedCache(layers, cache.length, cache.padding)


def _plain(cache: CompressedCache) -> list[RaggedLayer]:
    layers = [layer for layer in cache.layers if isinstance(layer, RaggedLayer)]
    if len(layers) < len(cache.layers):
        raise CacheError(
            "Quantised entries cannot be divided among processes yet. Use a recipe with the "
            "precision 'full'."
        )
    return layers


def _whole_layer(layer: RaggedLayer, shard: HeadShard) -> RaggedLayer:
    counts = shard.gather(layer.lengths)
    totals = counts.sum(dim=1).tolist()
    # Row s G + g of process r becomes row (s R + r) G + g.
    order = counts.view(shard.ranks, layer.sequences, -1).transpose(0, 1)
    # Where each of these rows begins among the entries of all processes, one after the other.
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), counts.flatten().cumsum(0)[:-1]])
    begins = begins.view(shard.ranks, layer.sequences, -1).transpose(0, 1).flatten()
    at = _ranges(begins, order.flatten())
    parts = {name: _gathered(getattr(layer, name), totals, shard)[at] for name in _PARTS}
    return RaggedLayer(**parts, offsets=offsets(order.flatten()), sequences=layer.sequences)


def _gathered(own: Tensor, totals: list[int], shard: HeadShard) -> Tensor:
    """`own` [E, ...] of all processes one after the other, on the CPU."""
    padded = own.new_zeros(max(totals), *own.shape[1:], device="cpu")
    padded[: len(own)] = own
    every = shard.gather(padded)
    return torch.cat([part[:total] for part, total in zip(every, totals, strict=True)])


def _own_layer(layer: RaggedLayer, shard: HeadShard) -> RaggedLayer:
    if layer.heads % shard.ranks:
        raise CacheError(
            f"The cache has {layer.heads} KV heads, which cannot be divided among {shard.ranks} "
            f"processes. Use a number of processes that divides them."
        )
    lengths = layer.lengths.view(layer.sequences, -1)
    begins = layer.offsets[:-1].view(layer.sequences, -1)
    counts = shard.own_heads(lengths, 1).flatten()
    at = _ranges(shard.own_heads(begins, 1).flatten(), counts)
    parts = {name: getattr(layer, name)[at.to(layer.device)] for name in _PARTS}
    return RaggedLayer(**parts, offsets=offsets(counts), sequences=layer.sequences)


def _ranges(begins: Tensor, counts: Tensor) -> Tensor:
    """int64 [n]: `counts` consecutive numbers from each of `begins` on."""
    row, step = rows_and_steps(counts)
    return begins[row] + step
