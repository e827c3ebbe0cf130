"""Ragged layers and decoding steps inside buffers of NaN, so that reading past an end shows."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gracekv.backends import AttentionStep
from gracekv.cache.base import RaggedEntries
from support.quantised_layers import layer_of


def inside_nan(x: Tensor) -> Tensor:
    """`x` inside a buffer of NaN."""
    buffer = x.new_full((len(x) + 9, *x.shape[1:]), math.nan)
    buffer[4:-5] = x
    return buffer[4:-5]


def ragged(
    rng: torch.Generator,
    lengths: list[int],
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    sequences: int = 1,
) -> RaggedEntries:
    """A layer whose heads hold so many entries."""
    layer = layer_of(rng, lengths, dim, dtype, sequences)
    read = ("keys", "values", "log_multiplicity")
    return replace(layer, **{name: inside_nan(getattr(layer, name)) for name in read})


def step(
    rng: torch.Generator, layer: RaggedEntries, group: int, batch: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A query, and a tail whose unused places are NaN."""
    dim, dtype = layer.keys.shape[1], layer.keys.dtype
    query = torch.randn(batch, layer.heads * group, 1, dim, generator=rng).to(dtype)
    buffers = torch.full((2, batch, layer.heads, length + 3, dim), math.nan, dtype=dtype)
    buffers[:, :, :, :length] = torch.randn(2, batch, layer.heads, length, dim, generator=rng)
    keys, values = buffers[:, :, :, :length]
    return query, keys, values


def drawn(seed: int, lengths: list[int], *sizes: int, **options: Any) -> tuple[Any, ...]:
    """A layer by `ragged`, and query, keys and values by `step` over it."""
    rng = torch.Generator().manual_seed(seed)
    layer = ragged(rng, lengths, **options)
    return layer, *step(rng, layer, *sizes)


def packed_alone(query: Tensor, packed: Any, scale: float, **options: Any) -> AttentionStep:
    """Attention of `query` [B, H, Tq, d] to packed entries only, for a backend's `prepare`."""
    empty = query.new_empty(query.shape[0], 1, 0, query.shape[3])
    return AttentionStep(query, packed, empty, empty, scale, **options)
