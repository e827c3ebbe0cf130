"""Scissorhands' score: how often recent queries find a token important."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from einops import reduce
from torch import Tensor

from gracekv.errors import ConfigError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.value.attention import all_column_sums, probabilities
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.seed_scores import mean_seed_scores

# Queries whose attention is compared at once.
_ROWS = 32


@final
@SCORERS.register("scissorhands")
@dataclass(frozen=True, slots=False)
class Scissorhands(Scorer):
    """How many of the last 400 queries pay a token at least uniform attention (Scissorhands).

    Query i finds token t important if its attention is 1 / (i + 1) or more. Counts are averaged
    over a KV head's group; ties go to the larger column sum, then to the earlier token. Scores are
    ranks under that order; a head's scores sum to 1.

    Source: Liu et al. (2023), Scissorhands, arXiv:2305.17118 (persistence of importance; no
    official code). Ours: one event after prefill, counting what is important rather than what is
    not, ties by column sums, and no larger shares for later layers.

    Cost: attention rows of the last `history` queries, and of all queries for the ties: O(L H T^2
    d), a third of a prefill at 4,096 tokens on a CPU.

    Attributes:
        history: last prompt queries that count (400).

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    history: int = 400

    def __post_init__(self) -> None:
        if self.history < 1:
            raise ConfigError(
                f"Scissorhands.history takes a number of queries >= 1; got {self.history!r}. The "
                f"published one is 400."
            )

    def needs(self) -> Needs:
        """The history's queries, and column sums for the ties."""
        return Needs(last_queries=self.history, column_sums=True)

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Ranks as scores. Raises `MissingCaptureError` unless all queries were captured."""
        device, groups = prefill.keys[0].device, prefill.kv_heads
        columns = all_column_sums(prefill)
        length = prefill.spans.length
        prefill = prefill.with_queries(range(max(0, length - self.history), length))
        inside = columns[..., region.start : region.end]
        sums = reduce(inside, "l (g n) t -> l g t", "mean", g=groups)
        counts = torch.stack(
            [self._counts(prefill, layer, region).to(device) for layer in range(prefill.layers)]
        )
        # Two stable sorts: the earlier token stays first among equals of both.
        order = sums.sort(dim=-1, descending=True, stable=True).indices
        later = counts.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
        order = order.gather(-1, later)
        worth = torch.arange(region.length, 0, -1, dtype=torch.float64, device=device)
        worth = (worth / worth.sum()).float().expand_as(order)
        tokens = torch.zeros_like(sums).scatter_(-1, order, worth)
        return TokenScores(tokens, mean_seed_scores(tokens), columns)

    def _counts(self, prefill: Prefill, layer: int, region: Region) -> Tensor:
        """int64 [G, N]: queries of the history, and query heads, that find each token important."""
        length, groups = prefill.spans.length, prefill.kv_heads
        device = prefill.keys[layer].device
        counts = torch.zeros(groups, region.length, dtype=torch.int64, device=device)
        for first in range(max(0, length - self.history), length, _ROWS):
            probes = torch.arange(first, min(first + _ROWS, length))
            seen = probabilities(prefill, layer, probes)[..., region.start : region.end]
            uniform = (1.0 / (probes + 1)).to(device)[:, None]
            important = reduce(seen >= uniform, "(g n) p t -> g t", "sum", g=groups)
            counts[:, : important.shape[-1]] += important
        return counts
