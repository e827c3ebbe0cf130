"""Choose a backend by where the cache lies."""

from __future__ import annotations

import torch

from gracekv.backends.base import BACKENDS, AttentionBackend, AttentionSpec, Backend

# Fastest first; one that cannot run there is passed over.
_PREFERRED = {"cuda": ("triton", "sdpa"), "cpu": ("numba", "sdpa")}
_ELSEWHERE = ("sdpa",)


@BACKENDS.register("auto")
class Auto(Backend):
    """The fastest registered backend for the device that each layer lies on.

    Source: ours.

    Cost: that of the backend that it resolves to.
    """

    def resolve(self, spec: AttentionSpec) -> AttentionBackend:
        """The first preferred backend that reads such a layer; "sdpa" reads all of them."""
        for name in _PREFERRED.get(spec.device.type, _ELSEWHERE):
            backend = BACKENDS.build(name).resolve(spec)
            if backend.obstacle(spec) is None:
                break
        return backend

    def describe(self, device: torch.device | str) -> str:
        """What is used on `device`, and why not something faster, as one line."""
        spec = AttentionSpec(torch.device(device))
        backend = self.resolve(spec)
        line = f"auto -> {backend.name} on {spec.device}: {backend.summary()}"
        for name in _PREFERRED.get(spec.device.type, ()):
            if name == backend.name:
                break
            faster = BACKENDS.build(name).resolve(spec)
            line += f" Not {name}: {faster.obstacle(spec)}"
        return line
