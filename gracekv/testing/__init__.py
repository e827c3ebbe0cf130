"""Generators and contract checks for our own tests and for those of plugins."""

from gracekv.testing.prefills import check_observer, synthetic_prefill

__all__ = ["check_observer", "synthetic_prefill"]
