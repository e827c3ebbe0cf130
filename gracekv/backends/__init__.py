"""Attention over the ragged cache."""

from gracekv.backends.auto import Auto
from gracekv.backends.base import (
    BACKENDS,
    AttentionBackend,
    AttentionSpec,
    AttentionStep,
    Backend,
)
from gracekv.backends.eager import Eager
from gracekv.backends.numba import Numba
from gracekv.backends.sdpa import Sdpa
from gracekv.backends.triton import Triton

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionSpec",
    "AttentionStep",
    "Auto",
    "Backend",
    "Eager",
    "Numba",
    "Sdpa",
    "Triton",
]
