"""Stage 2: token scores and head sensitivity."""

from gracekv.value.base import SCORERS, SENSITIVITIES, Relevance, Scorer, Sensitivity, TokenScores
from gracekv.value.block_replay import BlockReplay
from gracekv.value.chunk_order import ChunkOrder
from gracekv.value.column_sums import ColumnSums
from gracekv.value.compactor import Compactor
from gracekv.value.critical import Critical
from gracekv.value.draft_attention import DraftAttention
from gracekv.value.expected_attention import ExpectedAttention
from gracekv.value.key_difference import KeyDifference
from gracekv.value.key_norm import KeyNorm
from gracekv.value.kvzip_two_pass import KVzipTwoPass
from gracekv.value.lag_relative import LagRelative
from gracekv.value.last_query import LastQuery
from gracekv.value.mean_attention import MeanAttention
from gracekv.value.mixture import Mixture
from gracekv.value.multi_hop import MultiHop
from gracekv.value.none import NoSensitivity
from gracekv.value.output_projection import OutputProjection
from gracekv.value.read_ahead import ReadAhead
from gracekv.value.recency import Recency
from gracekv.value.replay import Replay
from gracekv.value.scissorhands import Scissorhands
from gracekv.value.value_norm import ValueNorm
from gracekv.value.window_attention import WindowAttention

__all__ = [
    "SCORERS",
    "SENSITIVITIES",
    "BlockReplay",
    "ChunkOrder",
    "ColumnSums",
    "Compactor",
    "Critical",
    "DraftAttention",
    "ExpectedAttention",
    "KVzipTwoPass",
    "KeyDifference",
    "KeyNorm",
    "LagRelative",
    "LastQuery",
    "MeanAttention",
    "Mixture",
    "MultiHop",
    "NoSensitivity",
    "OutputProjection",
    "ReadAhead",
    "Recency",
    "Relevance",
    "Replay",
    "Scissorhands",
    "Scorer",
    "Sensitivity",
    "TokenScores",
    "ValueNorm",
    "WindowAttention",
]
