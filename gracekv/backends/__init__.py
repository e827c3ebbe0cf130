"""Attention over the ragged cache."""

from gracekv.backends.auto import Auto
from gracekv.backends.base import BACKENDS, Backend, Partial, combine
from gracekv.backends.eager import Eager
from gracekv.backends.sdpa import Sdpa

__all__ = ["BACKENDS", "Auto", "Backend", "Eager", "Partial", "Sdpa", "combine"]
