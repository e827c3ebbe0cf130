"""Attention over the ragged cache."""

from gracekv.backends.attention_spec import AttentionSpec
from gracekv.backends.auto import Auto
from gracekv.backends.base import BACKENDS, AttentionBackend, Backend, Partial, combine
from gracekv.backends.eager import Eager
from gracekv.backends.numba import Numba
from gracekv.backends.sdpa import Sdpa
from gracekv.backends.triton import Triton

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionSpec",
    "Auto",
    "Backend",
    "Eager",
    "Numba",
    "Partial",
    "Sdpa",
    "Triton",
    "combine",
]
