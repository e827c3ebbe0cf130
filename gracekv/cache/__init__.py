"""Stage 5: the chosen nodes as a physically smaller cache."""

from gracekv.cache.accounting import Accounting, Timings
from gracekv.cache.base import PACKERS, Packer, RaggedCache, RaggedLayer
from gracekv.cache.prototype import PrototypePacker

__all__ = [
    "PACKERS",
    "Accounting",
    "Packer",
    "PrototypePacker",
    "RaggedCache",
    "RaggedLayer",
    "Timings",
]
