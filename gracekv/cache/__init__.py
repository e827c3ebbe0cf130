"""Stage 5: the chosen nodes as a physically smaller cache."""

from gracekv.cache.accounting import Accounting, Timings, WidthShare
from gracekv.cache.base import PACKERS, Packer, RaggedCache, RaggedEntries
from gracekv.cache.cam import CamPacker
from gracekv.cache.coded import CodedEntries, Codes, Coding
from gracekv.cache.d2o import D2OPacker
from gracekv.cache.entries import CompressedCache, LayerEntries
from gracekv.cache.evict import EvictPacker
from gracekv.cache.prototype import PrototypePacker
from gracekv.cache.quantised import QuantisedCache, QuantisedEntries, dequantised

__all__ = [
    "PACKERS",
    "Accounting",
    "CamPacker",
    "CodedEntries",
    "Codes",
    "Coding",
    "CompressedCache",
    "D2OPacker",
    "EvictPacker",
    "LayerEntries",
    "Packer",
    "PrototypePacker",
    "QuantisedCache",
    "QuantisedEntries",
    "RaggedCache",
    "RaggedEntries",
    "Timings",
    "WidthShare",
    "dequantised",
]
