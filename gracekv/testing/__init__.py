"""Generators and contract checks for our own tests and for those of plugins."""

from gracekv.testing.observers import check_observer
from gracekv.testing.prefills import synthetic_prefill

__all__ = ["check_observer", "synthetic_prefill"]
