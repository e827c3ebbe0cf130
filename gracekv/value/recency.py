"""StreamingLLM's score: the first tokens of the prompt, then the latest."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.prefill import LayerCapture, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer


@SCORERS.register("recency", works_sharded=True)
class Recency(Scorer):
    """The first 4 prompt tokens as sinks, then the latest tokens (StreamingLLM).

    Top-k keeps the sinks that lie outside the prompt's prefix (the prefix is always kept) and the
    most recent tokens. All heads have the same scores, which sum to 1.

    Source: Xiao et al. (2023), StreamingLLM, arXiv:2309.17453. Ours: the window as a score.

    Cost: none; no tensor is read.

    Attributes:
        sinks: number of first prompt tokens, which score higher than all others (StreamingLLM's 4).
    """

    sinks: int = bounded(4, at_least=0, hint="StreamingLLM's is 4; 0 keeps only recent tokens.")

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Ranks as scores [G, N]."""
        device = capture.keys.device
        rank = torch.arange(1, region.length + 1, dtype=torch.float64, device=device)
        sinks = min(max(0, self.sinks - region.start), region.length)
        # Sinks rank above all others, the earliest first.
        rank[:sinks] = region.length + torch.arange(sinks, 0, -1, device=device)
        return (rank / rank.sum()).float().expand(capture.kv_heads, -1)
