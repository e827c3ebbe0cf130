"""Choose a backend by where the cache lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from gracekv.backends.base import BACKENDS, Backend, Partial
from gracekv.cache.base import RaggedLayer

# Fastest first; one that cannot run there is passed over.
_PREFERRED = {"cuda": ("triton", "sdpa"), "cpu": ("numba", "sdpa")}
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

    Cost: that of the backend that it picks.
    """

    def pick(
        self, device: torch.device, dtype: torch.dtype | None = None, dim: int | None = None
    ) -> Backend:
        """The backend for caches on `device`, with heads of dimension `dim` in `dtype`."""
        for name in _PREFERRED.get(device.type, _ELSEWHERE):
            backend = BACKENDS.build(name)
            if backend.obstacle(device, dtype, dim) is None:
                break
        return backend

    def describe(self, device: torch.device | str) -> str:
        """What would be used on `device`, and why not something faster, as one line."""
        device = torch.device(device)
        backend = self.pick(device)
        line = f"auto -> {backend.name} on {device}: {backend.summary()}"
        for name in _PREFERRED.get(device.type, ()):
            if name == backend.name:
                break
            line += f" Not {name}: {BACKENDS.build(name).obstacle(device)}"
        return line

    def prepare(self, layer: RaggedLayer) -> Chosen:
        backend = self.pick(layer.keys.device, layer.keys.dtype, layer.keys.shape[-1])
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
        backend = self.pick(query.device, query.dtype, query.shape[-1])
        return backend.tail(query, keys, values, mask, scale)

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
