"""ChunkKV's order of tokens: chunk after chunk, the best chunk first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.errors import ConfigError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.seed_scores import mean_seed_scores
from gracekv.value.window_attention import WindowAttention


@final
@SCORERS.register("chunk_order")
@dataclass(frozen=True, slots=False)
class ChunkOrder(Scorer):
    """Tokens by the mean score of their chunk of 10, inside it by their own (ChunkKV).

    The b best tokens under it are whole chunks and, where b cuts one, that chunk's best tokens: so
    a selection of exactly b tokens that is ChunkKV's wherever b falls on a border. Ties go to the
    earlier chunk and the earlier token. Scores are ranks; a head's scores sum to 1.

    Source: Liu et al. (2025), arXiv:2502.00299, in the form of its code in kvpress (token scores
    summed over KV heads, averaged inside a chunk). Ours: the rest of a budget is spent inside the
    next chunk.

    Cost: that of `of`, and two sorts of its scores.

    Attributes:
        of: the token scores (SnapKV's window attention, unpooled, since chunks smooth already).
        size: tokens per chunk, counted from the left of the region (ChunkKV's 10).
        shared: all heads of a layer rank by the sum of their scores (ChunkKV); else each by its
            own.
        reuse: every so many layers rank anew, those between follow (ChunkKV's layer-wise index
            reuse; 1 is without).

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    of: Scorer = field(default_factory=lambda: WindowAttention(pooling="none"))
    size: int = 10
    shared: bool = True
    reuse: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.reuse < 1:
            raise ConfigError(
                f"ChunkOrder takes size >= 1 (tokens) and reuse >= 1 (layers); got "
                f"size={self.size!r}, reuse={self.reuse!r}. ChunkKV's are 10 and 1."
            )

    def needs(self) -> Needs:
        """What the token scores need."""
        return self.of.needs()

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Ranks as scores. Raises what `of` raises."""
        scores = self.of(prefill, region).scores.double()
        layers, heads, length = scores.shape
        if self.shared:
            scores = scores.sum(dim=1, keepdim=True)
        leader = torch.arange(layers, device=scores.device) // self.reuse * self.reuse
        order = self._order(scores[leader])
        worth = torch.arange(length, 0, -1, dtype=torch.float64, device=order.device)
        worth = (worth / worth.sum()).float().expand_as(order)
        ranked = torch.zeros_like(worth).scatter_(-1, order, worth)
        tokens = ranked.expand(-1, heads, -1).contiguous()
        return TokenScores(tokens, mean_seed_scores(tokens))

    def _order(self, scores: Tensor) -> Tensor:
        """int64 as `scores` [..., N]: tokens from first to last."""
        length = scores.shape[-1]
        chunks = -(-length // self.size)
        padded = functional.pad(scores, (0, chunks * self.size - length))
        counts = torch.full((chunks,), self.size, device=scores.device)
        counts[-1] = length - (chunks - 1) * self.size
        means = padded.unflatten(-1, (chunks, self.size)).sum(dim=-1) / counts
        best = means.sort(dim=-1, descending=True, stable=True).indices
        rank = torch.empty_like(best).scatter_(
            -1, best, torch.arange(best.shape[-1], device=best.device).expand_as(best)
        )
        # By falling score first; then, stably, by their chunks' ranks.
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        later = rank.gather(-1, order // self.size).sort(dim=-1, stable=True).indices
        return order.gather(-1, later)
