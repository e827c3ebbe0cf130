"""Stage `decode`: which entries stay when the cache reaches its limit during generation."""

from gracekv.decode.attention import Attention as Attention
from gracekv.decode.base import DECODERS as DECODERS
from gracekv.decode.base import Decoder as Decoder
from gracekv.decode.base import HeldLayer as HeldLayer
from gracekv.decode.compaction import Compaction as Compaction
from gracekv.decode.fitted import Fitted as Fitted
from gracekv.decode.guarded import Guarded as Guarded
from gracekv.decode.limit import Limit as Limit
from gracekv.decode.none import NoCut as NoCut
from gracekv.decode.random import Random as Random
from gracekv.decode.recent import Recent as Recent
from gracekv.decode.rkv import RKV as RKV
