"""`GraceCache`: a compressed prompt as a transformers `Cache`."""

from __future__ import annotations

import copy
from typing import Any

from transformers.cache_utils import Cache

from gracekv.backends import Auto, Backend
from gracekv.cache.base import RaggedCache
from gracekv.hf.layer import GraceLayer, PackedLayer


class GraceCache(Cache):  # type: ignore[misc]
    """A packed prompt and its continuation, for `model.generate(ids, past_key_values=cache)`.

    The packed part covers all prompt tokens but the last; `generate` is given the whole prompt and
    feeds the last token again. It is immutable and shared: caches from `fresh` and `deepcopy`, and
    the rows of a batch, differ in their tails only.

    Args:
        packed: one sequence's compressed cache.
        backend: who attends to it; default `Auto()`.

    The model must be attached (`gracekv.hf.attach`); without, the first step raises `CacheError`.
    """

    layers: list[GraceLayer]

    def __init__(self, packed: RaggedCache, backend: Backend | None = None) -> None:
        backend = backend or Auto()
        super().__init__(
            layers=[
                GraceLayer(PackedLayer(layer, backend.prepare(layer), backend, packed.length))
                for layer in packed.layers
            ]
        )

    def fresh(self) -> GraceCache:
        """A cache over the same packed part whose tail is empty."""
        twin = copy.copy(self)
        twin.layers = [layer.fresh() for layer in self.layers]
        return twin

    @property
    def packed_length(self) -> int:
        """Logical tokens that the packed part stands for."""
        return self.layers[0].packed.length

    @property
    def held_bytes(self) -> int:
        """Bytes that the backend holds beside the packed tensors (padding, copies)."""
        return sum(layer.packed.backend.held_bytes(layer.packed.prepared) for layer in self.layers)

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """No maximum; the name of `get_max_length` in older transformers."""
        return -1

    def __repr__(self) -> str:
        tail: Any = self.layers[0].tail_length
        return f"GraceCache(packed_length={self.packed_length}, tail={tail}, layers={len(self)})"
