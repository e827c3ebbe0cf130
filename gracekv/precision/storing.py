"""A packed cache whose entries are stored at given widths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache, RaggedLayer
from gracekv.cache.coded import CodedEntries, Coding
from gracekv.cache.quantised import QuantisedCache, QuantisedLayer
from gracekv.kernels import ragged
from gracekv.precision.quantise import as_read, quantise

EXACT = 16
"""The width of entries that stay as they are, in the model's dtype, whatever that is."""


def quantised(
    cache: RaggedCache, widths: Sequence[Tensor], codings: Sequence[Coding]
) -> QuantisedCache:
    """Every entry at its width (uint8 [E] a layer), which is `EXACT` or that of a coding.

    Raises `NonFiniteError` if numbers cannot be quantised.
    """
    layers = tuple(_layer(*pair, codings) for pair in zip(cache.layers, widths, strict=True))
    return QuantisedCache(layers, cache.length, cache.padding)


def keys_as_read(
    cache: RaggedCache,
    widths: Sequence[Tensor],
    codings: Sequence[Coding],
    dim: int | None = None,
) -> RaggedCache:
    """`cache` with the keys, float32 [E, d], that `quantised` would store.

    Coordinates from `dim` on stay as they are.

    Raises `NonFiniteError` if keys cannot be quantised.
    """
    layers = []
    for layer, own in zip(cache.layers, widths, strict=True):
        keys = layer.keys.to(torch.float32, copy=True)
        for coding in codings:
            mask = own == coding.bits
            part = _subset(layer, mask)
            keys[mask, :dim] = as_read(part.keys[:, :dim], part.lengths, coding, coding.keys)
        layers.append(dataclasses.replace(layer, keys=keys))
    return dataclasses.replace(cache, layers=tuple(layers))


def _layer(layer: RaggedLayer, widths: Tensor, codings: Sequence[Coding]) -> QuantisedLayer:
    coded = tuple(_coded(_subset(layer, widths == coding.bits), coding) for coding in codings)
    return QuantisedLayer(_subset(layer, widths == EXACT), coded)


def _coded(part: RaggedLayer, coding: Coding) -> CodedEntries:
    keys, values = (
        quantise(numbers, part.lengths, coding, by)
        for numbers, by in ((part.keys, coding.keys), (part.values, coding.values))
    )
    return CodedEntries(
        keys,
        values,
        part.positions,
        part.log_multiplicity,
        part.offsets,
        coding,
        part.sequences,
    )


def _subset(layer: RaggedLayer, mask: Tensor) -> RaggedLayer:
    """The entries of `layer` where `mask` (bool [E]) holds."""
    inside = ragged.offsets(mask.cpu().long())
    return RaggedLayer(
        layer.keys[mask],
        layer.values[mask],
        layer.positions[mask],
        layer.log_multiplicity[mask],
        inside[layer.offsets],
        layer.sequences,
    )
