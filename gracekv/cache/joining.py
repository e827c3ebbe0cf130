"""Appends the entries of a passage to those packed before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.cache.entries import CompressedCache, LayerEntries
from gracekv.cache.quantised import QuantisedEntries
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.kernels.ragged import offsets
from gracekv.prefill.spans import Past


def past_of(cache: CompressedCache, shard: HeadShard = WHOLE, places: int | None = None) -> Past:
    """The entries of one sequence for a passage to attend to, in the model's dtype.

    Heads are padded to `places`; by default to the longest head of all processes of `shard`.
    """
    layers = []
    for layer in cache.layers:
        entries = layer.dequantised(layer.dtype)
        heads = (entries.head(g) for g in range(layer.heads))
        layers.append([(keys, values, log_m) for keys, values, _, log_m in heads])
    if places is None:
        places = max(1, int(shard.maximum(cache.entries().amax())))
    return Past(layers, places, cache.length, cache.other_layers)


def joined_cache(
    old: CompressedCache, new: CompressedCache, places: int, shard: HeadShard = WHOLE
) -> CompressedCache:
    """The entries of `old`, bit for bit, followed in each head by those of a passage.

    Args:
        old: the cache that the passage was read over.
        new: the passage's cache, whose positions start at `places`.
        places: P of the `Past`.
        shard: the KV heads that this process holds.
    """
    shift = old.length - places
    # A width that the passage does not use in any process needs no part.
    counts = torch.tensor([[part.entries for part in layer.coded] for layer in new.layers]).sum(0)
    widths = shard.sum(counts).nonzero().flatten().tolist()
    layers = list[LayerEntries]()
    for old_layer, new_layer in zip(old.layers, new.layers, strict=True):
        joined = _joined_layer(old_layer.exact, new_layer.exact, shift)
        # The old parts, then the new ones: blocks cannot grow without new codes.
        new_parts = (new_layer.coded[n] for n in widths)
        shifted = (dataclasses.replace(x, positions=x.positions + shift) for x in new_parts)
        parts = tuple(sorted([*old_layer.coded, *shifted], key=lambda part: -part.coding.bits))
        layers.append(QuantisedEntries(joined, parts) if parts else joined)
    return dataclasses.replace(new, layers=tuple(layers), length=new.length + shift)


def joined_scores(
    parts: Sequence[tuple[CompressedCache, Sequence[Tensor] | None]],
    updates: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """The scores [E] of the entries of `joined_cache` by layer; inf if unknown.

    `parts` are its two caches with their scores. Entries of the second without a score, such as its
    recent window, get the mean of their head: if they always stayed, a limit would fill with the
    windows of all passages.

    An old entry to which the passage's queries give a higher score, `updates` [G, P] by layer,
    keeps that score, so that entries of different passages can be compared.
    """
    (old, old_scores), (new, scores) = parts
    old_heads, new_heads = _by_head(old, old_scores), _by_head(new, scores)
    for heads, update in zip(old_heads, updates or (), strict=False):
        heads[:] = [x.maximum(y[len(y) - len(x) :]) for x, y in zip(heads, update, strict=True)]
    if scores is not None:
        new_heads = [list(map(_without_gaps, heads)) for heads in new_heads]
    layers = (zip(*pair, strict=True) for pair in zip(old_heads, new_heads, strict=True))
    return tuple(torch.cat([x for both in heads for x in both]) for heads in layers)


def _by_head(cache: CompressedCache, scores: Sequence[Tensor] | None) -> list[list[Tensor]]:
    """The scores [E] of each head of each layer; inf if unknown."""
    pairs = zip(scores or cache.unknown_scores(), cache.layers, strict=True)
    return [list(own.split(layer.lengths.tolist())) for own, layer in pairs]


def _without_gaps(scores: Tensor) -> Tensor:
    """Scores [E] of a head, with inf replaced by their mean."""
    finite = scores[scores.isfinite()]
    return scores.masked_fill(scores.isinf(), float(finite.mean()) if len(finite) else 0.0)


def _joined_layer(old: RaggedEntries, new: RaggedEntries, shift: int) -> RaggedEntries:
    """For each head, the entries of `old`, then those of `new`, shifted by `shift` positions."""
    new = dataclasses.replace(new, positions=new.positions + shift)
    parts = [part.head(g) for g in range(old.heads) for part in (old, new)]
    keys, values, positions, log_m = map(torch.cat, zip(*parts, strict=True))
    return RaggedEntries(keys, values, positions, log_m, offsets(old.lengths + new.lengths))
