"""Stage 1: slots."""

from gracekv.segment.base import SEGMENTERS, Partition, Segmenter

__all__ = ["SEGMENTERS", "Partition", "Segmenter"]
