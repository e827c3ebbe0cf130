"""Stage 5: the chosen nodes as a physically smaller cache."""

from gracekv.cache.accounting import Accounting, Timings
from gracekv.cache.base import PACKERS, Packer, RaggedCache, RaggedLayer
from gracekv.cache.cam import CamPacker
from gracekv.cache.d2o import D2OPacker
from gracekv.cache.evict import EvictPacker
from gracekv.cache.prototype import PrototypePacker

__all__ = [
    "PACKERS",
    "Accounting",
    "CamPacker",
    "D2OPacker",
    "EvictPacker",
    "Packer",
    "PrototypePacker",
    "RaggedCache",
    "RaggedLayer",
    "Timings",
]
