"""The method as a value: `Pipeline`, what one run of it made, and pipelines as files."""

from gracekv.pipeline.compression import Pipeline

__all__ = ["Pipeline"]
