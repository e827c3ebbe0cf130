"""The stages of a pipeline, and the strategies that are registered for each."""

from __future__ import annotations

from typing import Any

from gracekv.allocate import ALLOCATORS, FLOORS, QUOTAS
from gracekv.backends import BACKENDS
from gracekv.cache import PACKERS
from gracekv.decode import DECODERS
from gracekv.fit import FITTERS
from gracekv.precision import PRECISIONS
from gracekv.registry import Registry
from gracekv.segment import SEGMENTERS
from gracekv.tree import DISTORTIONS, REFINERS
from gracekv.value import SCORERS, SENSITIVITIES

REGISTRIES: dict[str, Registry[Any]] = {
    "segment": SEGMENTERS,
    "value": SCORERS,
    "sensitivity": SENSITIVITIES,
    "distortion": DISTORTIONS,
    "refine": REFINERS,
    "floor": FLOORS,
    "quota": QUOTAS,
    "allocate": ALLOCATORS,
    "pack": PACKERS,
    "fit": FITTERS,
    "precision": PRECISIONS,
    "decode": DECODERS,
    "backend": BACKENDS,
}


def strategies() -> dict[str, dict[str, str]]:
    """Every registered strategy: {stage: {name: one-line description}}."""
    return {
        stage: {name: registry.get(name).summary() for name in registry}
        for stage, registry in REGISTRIES.items()
    }
