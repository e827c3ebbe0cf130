"""The method as a value: `Pipeline`, the results of one run, and pipeline files."""

from gracekv.pipeline.compression import Pipeline

__all__ = ["Pipeline"]
