"""StreamingLLM's score: the first tokens of the prompt, then the latest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from gracekv.errors import ConfigError
from gracekv.prefill import Prefill, Region
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.seed_scores import mean_seed_scores


@final
@SCORERS.register("recency")
@dataclass(frozen=True, slots=False)
class Recency(Scorer):
    """The first 4 prompt tokens as sinks, then the later the better (StreamingLLM).

    Top-k under it keeps the sinks that the prompt's prefix does not already hold (those are kept
    anyway) and the most recent tokens. All heads score alike; a head's scores sum to 1.

    Source: Xiao et al. (2023), StreamingLLM, arXiv:2309.17453. Ours: the window as a score.

    Cost: none; no tensor is read.

    Attributes:
        sinks: first tokens of the prompt that outrank all others (StreamingLLM's 4).

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(
                f"Recency.sinks takes a number of tokens >= 0; got {self.sinks!r}. StreamingLLM's "
                f"is 4; give 0 for recent tokens alone."
            )

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Ranks as scores."""
        device = prefill.keys[0].device
        rank = torch.arange(1, region.length + 1, dtype=torch.float64, device=device)
        sinks = min(max(0, self.sinks - region.start), region.length)
        # Above every other rank, the earliest sink highest.
        rank[:sinks] = region.length + torch.arange(sinks, 0, -1, device=device)
        row = (rank / rank.sum()).float()
        tokens = row.repeat(prefill.layers, prefill.kv_heads, 1)
        return TokenScores(tokens, mean_seed_scores(tokens))
