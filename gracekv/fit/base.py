"""The interface of fitters, which change kept entries, never which ones are kept."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.cache.batches import batches
from gracekv.prefill import LayerCapture, Prefill, PrefillReader, Region
from gracekv.registry import Registry, Strategy
from gracekv.value import Memory

# Bytes of values, as float32, that are compared at once on a GPU.
_BATCH = 64 * 2**20


class Fitter(PrefillReader, Strategy, abc.ABC):
    """Fit the kept entries so that attention over them matches attention over all tokens.

    There are two steps: `reference` records the outputs of a layer while all of it is there, and
    `layer` fits the entries that stayed when the rest is gone. Positions and the number of entries
    stay. Keys stay too, unless a strategy says that it moves them.
    Entries outside the compressible region (prefix, recent window, question) stay bit for bit.
    Deterministic; computed in float32 or better; values return to the cache's dtype. Finite values
    stay finite.
    """

    @property
    def compares_layers(self) -> bool:
        """Whether `reference` of a layer depends on the layers above it."""
        return False

    def asks(self, prefill: Prefill, region: Region, memory: Memory) -> Tensor:
        """int64 [P] on the CPU: positions whose queries `reference` reads."""
        return torch.zeros(0, dtype=torch.int64)

    def reference(self, capture: LayerCapture, region: Region, memory: Memory) -> Any:
        """The record of one layer that `layer` needs; arguments as for `Scorer.layer`."""
        return None

    @abc.abstractmethod
    def layer(self, packed: RaggedEntries, reference: Any, region: Region) -> RaggedEntries:
        """The entries of one layer, with those of `region` fitted."""

    def layers(self, cache: RaggedCache, references: list[Any], region: Region) -> RaggedCache:
        """Fit all layers; removes their `references` from the list, which frees them."""
        fitted = []
        for own in cache.layers:
            reference = references.pop(0)
            fitted.append(self.layer(own, reference, region) if own.entries else own)
        return dataclasses.replace(cache, layers=tuple(fitted))


FITTERS = Registry("fit", "how kept entries make up for dropped ones", Fitter)


def value_change(packed: RaggedCache, fitted: RaggedCache) -> Tensor:
    """|v' - v| / |v| of every entry in hundredths: uint8 [E] on the CPU, layer after layer.

    255 stands for 2.55 and more.
    """
    changes = []
    for some in batches(packed.layers, lambda layer: 4 * layer.values.numel(), _BATCH):
        old, new = (_values(cache.layers[some]) for cache in (packed, fitted))
        dtype = torch.promote_types(old.dtype, torch.float32)
        norm = torch.linalg.vector_norm(old, dim=-1, dtype=dtype)
        moved = torch.linalg.vector_norm(new.to(dtype) - old, dim=-1)
        changes.append((moved / norm.clamp_min_(1e-12)).to(packed.layers[0].device))
    return torch.cat(changes).mul_(100).round_().clamp_(max=255).to("cpu", torch.uint8)


def _values(layers: Sequence[RaggedEntries]) -> Tensor:
    """[E, d]: the values of `layers`, one after the other."""
    return torch.cat([x.values for x in layers]) if len(layers) > 1 else layers[0].values
