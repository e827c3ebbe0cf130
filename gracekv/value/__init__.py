"""Stage 2: token scores and head sensitivity."""

from gracekv.errors import renamed_in
from gracekv.value.base import SCORERS as SCORERS
from gracekv.value.base import Memory as Memory
from gracekv.value.base import Relevance as Relevance
from gracekv.value.base import Scorer as Scorer
from gracekv.value.base import TokenScores as TokenScores
from gracekv.value.block_replay import BlockReplay as BlockReplay
from gracekv.value.chunk_order import ChunkOrder as ChunkOrder
from gracekv.value.column_sums import ColumnSums as ColumnSums
from gracekv.value.compactor import Compactor as Compactor
from gracekv.value.critical import Critical as Critical
from gracekv.value.defensive import Defensive as Defensive
from gracekv.value.draft_attention import DraftAttention as DraftAttention
from gracekv.value.expected_attention import ExpectedAttention as ExpectedAttention
from gracekv.value.key_difference import KeyDifference as KeyDifference
from gracekv.value.key_norm import KeyNorm as KeyNorm
from gracekv.value.kvzip_two_pass import KVzipTwoPass as KVzipTwoPass
from gracekv.value.lag_relative import LagRelative as LagRelative
from gracekv.value.last_query import LastQuery as LastQuery
from gracekv.value.matching_pursuit import MatchingPursuit as MatchingPursuit
from gracekv.value.mean_attention import MeanAttention as MeanAttention
from gracekv.value.mixture import Mixture as Mixture
from gracekv.value.multi_hop import MultiHop as MultiHop
from gracekv.value.none import NoSensitivity as NoSensitivity
from gracekv.value.output_projection import OutputProjection as OutputProjection
from gracekv.value.read_ahead import ReadAhead as ReadAhead
from gracekv.value.recency import Recency as Recency
from gracekv.value.repeated_attention import RepeatedAttention as RepeatedAttention
from gracekv.value.replay import Replay as Replay
from gracekv.value.scissorhands import Scissorhands as Scissorhands
from gracekv.value.sensitivity import SENSITIVITIES as SENSITIVITIES
from gracekv.value.sensitivity import Sensitivity as Sensitivity
from gracekv.value.value_norm import ValueNorm as ValueNorm
from gracekv.value.window_attention import WindowAttention as WindowAttention

__getattr__ = renamed_in(__name__, {"LayerScorer": "Scorer"})
