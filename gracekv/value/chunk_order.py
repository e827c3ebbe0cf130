"""ChunkKV's order of tokens: chunk after chunk, the best chunk first."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from gracekv.prefill import LayerCapture, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer, part_scores, rank_scores
from gracekv.value.window_attention import WindowAttention


@SCORERS.register("chunk_order")
class ChunkOrder(Scorer):
    """Tokens by the mean score of their chunk of 10, inside it by their own (ChunkKV).

    All heads of a layer share one ranking, by the sum of their scores. The b best tokens are whole
    chunks, then the best tokens of the next chunk, so any b is met exactly. Ties go to the earlier
    chunk and the earlier token. Scores are ranks; a head's scores sum to 1.

    Source: Liu et al. (2025), arXiv:2502.00299, in the form of its code in kvpress (token scores
    summed over KV heads, averaged inside a chunk). Ours: the remaining budget is spent inside the
    next chunk.

    Cost: that of `scorer`, and two sorts of its scores.

    Attributes:
        scorer: the token scores (SnapKV's window attention, unpooled, since chunks already smooth).
        chunk_size: tokens per chunk, counted from the start of the region (ChunkKV's 10).
    """

    removed_fields = (("share_heads", True), ("reuse_layers", 1))
    scorer: Scorer = field(default_factory=lambda: WindowAttention(pooling="none"))
    chunk_size: int = bounded(10, at_least=1, hint="ChunkKV's is 10.")

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Ranks as scores [G, N]."""
        scores = part_scores(self.scorer, capture, region, memory).double().sum(dim=0)
        length = scores.shape[-1]
        chunks = -(-length // self.chunk_size)
        padded = torch.nn.functional.pad(scores, (0, chunks * self.chunk_size - length))
        counts = torch.full((chunks,), self.chunk_size, device=scores.device)
        counts[-1] = length - (chunks - 1) * self.chunk_size
        means = padded.unflatten(-1, (chunks, self.chunk_size)).sum(dim=-1) / counts
        rank = means.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        # Sort by descending score, then stably by the ranks of the chunks.
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        by_chunk = rank.gather(-1, order // self.chunk_size).sort(dim=-1, stable=True).indices
        return rank_scores(order.gather(-1, by_chunk)).expand(capture.kv_heads, -1)
