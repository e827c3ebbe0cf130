"""Chooses a backend by the device of the cache."""

from __future__ import annotations

import torch

from gracekv.backends.base import BACKENDS, AttentionBackend, AttentionSpec, Backend

# By device; "sdpa" runs everywhere.
_FASTEST = {"cuda": "triton", "cpu": "numba"}


@BACKENDS.register("auto")
class Auto(Backend):
    """The fastest registered backend for the device of each layer.

    Source: ours.

    Cost: that of the backend that it resolves to.
    """

    def resolve(self, spec: AttentionSpec) -> AttentionBackend:
        """The fastest backend if it can read such a layer, else "sdpa", which can read all."""
        backend = BACKENDS.build(_FASTEST.get(spec.device.type, "sdpa")).resolve(spec)
        return backend if backend.obstacle(spec) is None else BACKENDS.build("sdpa").resolve(spec)

    def describe(self, device: torch.device | str) -> str:
        """The backend for `device` and, if it is not the fastest, the reason, in one line."""
        spec = AttentionSpec(torch.device(device))
        backend = self.resolve(spec)
        line = f"auto -> {backend.name} on {spec.device}: {backend.summary()}"
        fastest = BACKENDS.build(_FASTEST.get(spec.device.type, backend.name)).resolve(spec)
        if fastest != backend:
            line += f" Not {fastest.name}: {fastest.obstacle(spec)}"
        return line
