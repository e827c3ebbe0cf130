"""Generators and contract checks for our own tests and for those of plugins."""

from gracekv.testing.prefills import synthetic_prefill

__all__ = ["synthetic_prefill"]
