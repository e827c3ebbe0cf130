"""Stage 1: slots."""

from gracekv.segment.base import SEGMENTERS, Partition, Segmenter
from gracekv.segment.curvature import Curvature
from gracekv.segment.curvature_dp import CurvatureDP
from gracekv.segment.fixed_chunks import FixedChunks
from gracekv.segment.tokens import Tokens
from gracekv.segment.uniform import Uniform

__all__ = [
    "SEGMENTERS",
    "Curvature",
    "CurvatureDP",
    "FixedChunks",
    "Partition",
    "Segmenter",
    "Tokens",
    "Uniform",
]
