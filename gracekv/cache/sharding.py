"""Gathers a packed cache whose heads are sharded over processes, and shards one again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.cache.coded import CodedEntries
from gracekv.cache.entries import CompressedCache, LayerEntries
from gracekv.cache.quantised import QuantisedEntries
from gracekv.distributed.sharding import HeadShard
from gracekv.errors import CacheError
from gracekv.kernels.ragged import blocks, offsets, rows_and_steps
from gracekv.prefill.layer_state import LayerState

Part = TypeVar("Part", RaggedEntries, CodedEntries)


def gathered_cache(cache: CompressedCache, shard: HeadShard) -> CompressedCache:
    """The cache of all heads on the CPU; all processes must call this together.

    In addition to the result, one layer of all processes is held.
    """
    return _map(cache, lambda x: _whole(x, shard), lambda x: shard.all_heads(x.cpu(), 1))


def own_cache(cache: CompressedCache, shard: HeadShard) -> CompressedCache:
    """This process's part of a cache of all heads.

    Raises `CacheError` if the heads cannot be divided among the processes.
    """
    return _map(cache, lambda x: _own_part(x, shard), lambda x: shard.own_heads(x, 1).contiguous())


def _map(
    cache: CompressedCache, parts: Callable[[Any], Any], states: Callable[[Tensor], Tensor]
) -> CompressedCache:
    """The cache with every part and every state [S, G, n, d] of sliding layers replaced."""

    def layer(old: LayerEntries) -> Any:
        if isinstance(old, QuantisedEntries):
            return QuantisedEntries(parts(old.exact), tuple(map(parts, old.coded)))
        return parts(old)

    def shared(old: LayerState) -> LayerState:
        if old.window is None:
            # Every process holds such a state completely.
            return old
        return replace(old, tensors={name: states(x) for name, x in old.tensors.items()})

    layers, others = tuple(map(layer, cache.layers)), tuple(map(shared, cache.other_layers))
    return CompressedCache(layers, cache.length, cache.padding, others)


def _whole(part: Part, shard: HeadShard) -> Part:
    lengths, columns = shard.gather(part.lengths), {}
    for name, column in part.columns().items():
        counts = _counts(part, name, lengths)
        # The start of each row in the concatenated rows of all processes.
        begins = offsets(counts.flatten())[:-1].view_as(counts)
        at = _ranges(_in_order(begins, part), _in_order(counts, part))
        columns[name] = _gather(column, counts.sum(dim=1).tolist(), shard)[at]
    return _part_of(part, columns, _in_order(lengths, part))


def _own_part(part: Part, shard: HeadShard) -> Part:
    if (heads := len(part.lengths) // part.sequences) % shard.ranks:
        raise CacheError(
            f"The cache has {heads} KV heads, which cannot be divided among {shard.ranks} "
            f"processes. Use a number of processes that divides them."
        )

    def own(numbers: Tensor) -> Tensor:
        return shard.own_heads(numbers.view(part.sequences, heads), 1).flatten()

    columns = {}
    for name, tensor in part.columns().items():
        counts = _counts(part, name, part.lengths)
        columns[name] = tensor[_ranges(own(offsets(counts)[:-1]), own(counts)).to(tensor.device)]
    return _part_of(part, columns, own(part.lengths))


def _counts(part: RaggedEntries | CodedEntries, name: str, lengths: Tensor) -> Tensor:
    """int64, same shape as `lengths`: rows of the tensor `name` for heads of `lengths` entries."""
    if isinstance(part, RaggedEntries):
        return lengths
    return blocks(lengths, part.coding.group) if part.by_block(name) else lengths


def _in_order(numbers: Tensor, part: RaggedEntries | CodedEntries) -> Tensor:
    """int64 [S R G] of numbers [R, S G]: row s G + g of process r becomes row (s R + r) G + g."""
    return numbers.view(len(numbers), part.sequences, -1).transpose(0, 1).flatten()


def _part_of(like: Part, tensors: Mapping[str, Tensor], lengths: Tensor) -> Part:
    """A part like `like`, with `tensors` [n, ...] and rows of `lengths` (int64 [rows]) entries."""
    columns = {**tensors, "offsets": offsets(lengths)}
    if isinstance(like, CodedEntries):
        return CodedEntries.of_tensors(columns, like.coding, like.sequences)
    return RaggedEntries(**columns, sequences=like.sequences)


def _gather(rows: Tensor, totals: list[int], shard: HeadShard) -> Tensor:
    """`rows` [n, ...] of all processes, concatenated on the CPU."""
    padded = rows.new_zeros(max(totals), *rows.shape[1:], device="cpu")
    padded[: len(rows)] = rows
    every = shard.gather(padded)
    return torch.cat([part[:total] for part, total in zip(every, totals, strict=True)])


def _ranges(begins: Tensor, counts: Tensor) -> Tensor:
    """int64 [n]: `counts` consecutive numbers starting at each of `begins`."""
    row, step = rows_and_steps(counts)
    return begins[row] + step
