"""Choose a backend by where the cache lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from gracekv.backends.base import BACKENDS, Backend, Partial
from gracekv.cache.base import RaggedLayer

# Fastest first; a backend that is not registered (its package is missing) is passed over.
_PREFERRED = {"cuda": ("triton", "sdpa")}
_ELSEWHERE = ("sdpa",)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What a layer was prepared by, and the result.

    Attributes:
        backend: the backend that `auto` picked for this layer's device.
        prepared: what that backend holds.
    """

    backend: Backend
    prepared: Any


@final
@BACKENDS.register("auto")
@dataclass(frozen=True, slots=False)
class Auto(Backend):
    """The fastest registered backend for the device that each layer lies on.

    Source: ours.
    """

    def pick(self, device: torch.device) -> Backend:
        """The backend for caches on `device`."""
        names = _PREFERRED.get(device.type, _ELSEWHERE)
        return BACKENDS.build(next(name for name in names if name in BACKENDS))

    def describe(self, device: torch.device | str) -> str:
        """What would be used on `device`, as one line."""
        backend = self.pick(torch.device(device))
        return f"auto -> {backend.name} on {device}: {backend.summary()}"

    def prepare(self, layer: RaggedLayer) -> Chosen:
        backend = self.pick(layer.keys.device)
        return Chosen(backend, backend.prepare(layer))

    def held_bytes(self, prepared: Chosen) -> int:
        return prepared.backend.held_bytes(prepared.prepared)

    def warm(self, prepared: Chosen, query_heads: int) -> None:
        prepared.backend.warm(prepared.prepared, query_heads)

    def packed(
        self, query: Tensor, prepared: Chosen, scale: float, rows: Tensor | None = None
    ) -> Partial:
        return prepared.backend.packed(query, prepared.prepared, scale, rows)

    def tail(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Partial:
        return self.pick(query.device).tail(query, keys, values, mask, scale)

    def __call__(
        self,
        query: Tensor,
        prepared: Chosen,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        rows: Tensor | None = None,
    ) -> Tensor:
        return prepared.backend(query, prepared.prepared, keys, values, mask, scale, rows)
