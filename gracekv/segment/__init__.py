"""Stage 1: slots."""

from gracekv.segment.base import SEGMENTERS as SEGMENTERS
from gracekv.segment.base import Partition as Partition
from gracekv.segment.base import Segmenter as Segmenter
from gracekv.segment.curvature import Curvature as Curvature
from gracekv.segment.curvature_dp import CurvatureDP as CurvatureDP
from gracekv.segment.tokens import Tokens as Tokens
from gracekv.segment.uniform import Uniform as Uniform
