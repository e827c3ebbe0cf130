"""Stage 5: turn the chosen nodes into a physically smaller cache."""

from gracekv.cache.accounting import Accounting as Accounting
from gracekv.cache.accounting import Occupancy as Occupancy
from gracekv.cache.accounting import Timings as Timings
from gracekv.cache.accounting import WidthShare as WidthShare
from gracekv.cache.base import PACKERS as PACKERS
from gracekv.cache.base import LayerToPack as LayerToPack
from gracekv.cache.base import Packer as Packer
from gracekv.cache.base import RaggedCache as RaggedCache
from gracekv.cache.base import RaggedEntries as RaggedEntries
from gracekv.cache.cam import CamPacker as CamPacker
from gracekv.cache.coded import CodedEntries as CodedEntries
from gracekv.cache.coded import Codes as Codes
from gracekv.cache.coded import Coding as Coding
from gracekv.cache.d2o import D2OPacker as D2OPacker
from gracekv.cache.entries import CompressedCache as CompressedCache
from gracekv.cache.entries import LayerEntries as LayerEntries
from gracekv.cache.evict import EvictPacker as EvictPacker
from gracekv.cache.prototype import PrototypePacker as PrototypePacker
from gracekv.cache.quantised import QuantisedEntries as QuantisedEntries
from gracekv.cache.quantised import dequantised as dequantised
