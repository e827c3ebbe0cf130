"""Attention over the ragged cache."""

from gracekv.backends.base import BACKENDS, Backend, Partial, combine

__all__ = ["BACKENDS", "Backend", "Partial", "combine"]
