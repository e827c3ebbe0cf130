"""Choose a backend by where the cache lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from gracekv.backends.base import BACKENDS, AttentionBackend, Backend, given
from gracekv.cache.coded import Coding

# Fastest first; one that cannot run there is passed over.
_PREFERRED = {"cuda": ("triton", "sdpa"), "cpu": ("numba", "sdpa")}
_ELSEWHERE = ("sdpa",)


@final
@BACKENDS.register("auto")
@dataclass(frozen=True, slots=False)
class Auto(Backend):
    """The fastest registered backend for the device that each layer lies on.

    Source: ours.

    Cost: that of the backend that it resolves to.
    """

    def resolve(
        self,
        device: torch.device,
        dtype: torch.dtype | None = None,
        dim: int | None = None,
        coding: Coding | None = None,
        *,
        softcap: bool = False,
        sink_logits: bool = False,
    ) -> AttentionBackend:
        """The first preferred backend that reads such a cache; "sdpa" reads all of them."""
        options = given(softcap=softcap, sink_logits=sink_logits)
        for name in _PREFERRED.get(device.type, _ELSEWHERE):
            backend = BACKENDS.build(name).resolve(device, dtype, dim, coding, **options)
            if backend.obstacle(device, dtype, dim, coding, **options) is None:
                break
        return backend

    def describe(self, device: torch.device | str) -> str:
        """What is used on `device`, and why not something faster, as one line."""
        device = torch.device(device)
        backend = self.resolve(device)
        line = f"auto -> {backend.name} on {device}: {backend.summary()}"
        for name in _PREFERRED.get(device.type, ()):
            if name == backend.name:
                break
            faster = BACKENDS.build(name).resolve(device)
            line += f" Not {name}: {faster.obstacle(device)}"
        return line
