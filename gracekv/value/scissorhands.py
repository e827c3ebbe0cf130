"""Scissorhands' score: how many recent queries find a token important."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange, reduce
from torch import Tensor

from gracekv.kernels.linalg import capped, softmax
from gracekv.prefill import LayerCapture, Needs, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer, rank_scores
from gracekv.value.column_sums import ColumnSums

# Queries per block.
_ROWS = 32


@SCORERS.register("scissorhands", works_sharded=True)
class Scissorhands(Scorer):
    """How many of the last 400 queries pay a token at least uniform attention (Scissorhands).

    Query i finds token t important if its attention is 1 / (i + 1) or more. Counts are averaged
    over a KV head's group; ties go to the larger column sum, then to the earlier token. Scores are
    ranks in that order; a head's scores sum to 1.

    Source: Liu et al. (2023), Scissorhands, arXiv:2305.17118 (persistence of importance; no
    official code). Ours: one eviction after prefill, counting how often a token is important rather
    than unimportant, ties by column sums, and equal shares for all layers.

    Cost: attention rows of the last `history` queries, and of all queries for the ties, as in
    `column_sums`: O(L H T² d).

    Attributes:
        history: number of last prompt queries (the paper's 400).
    """

    history: int = bounded(400, at_least=1, hint="The published number of queries is 400.")

    def needs(self) -> Needs:
        """The history's queries, and column sums for the ties."""
        return Needs(last_queries=self.history) | ColumnSums().needs()

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Ranks as scores [G, N]."""
        sums, groups = ColumnSums().layer(capture, region, memory), capture.kv_heads
        device = capture.keys.device
        # Queries and query heads that find each token important.
        counts = torch.zeros(groups, region.length, dtype=torch.int64, device=device)
        for probes in torch.tensor(capture.spans.last(self.history)).split(_ROWS):
            shares = attention_probabilities(capture, probes)[..., region.start : region.end]
            uniform = (1.0 / (probes + 1).float()).to(device)[:, None]
            important = reduce(shares >= uniform, "(g n) p t -> g t", "sum", g=groups)
            counts[:, : important.shape[-1]] += important
        # Two stable sorts: if both are equal, the earlier token stays first.
        by_sum = sums.sort(dim=-1, descending=True, stable=True).indices
        by_count = counts.gather(-1, by_sum).sort(dim=-1, descending=True, stable=True).indices
        return rank_scores(by_sum.gather(-1, by_count))


def attention_probabilities(capture: LayerCapture, probes: Sequence[int] | Tensor) -> Tensor:
    """pi: attention of each probe over the tokens up to its own position, float32 [H, P, S].

    Args:
        capture: a layer whose H query heads share G KV heads.
        probes: P >= 1 absolute positions.

    S = max(probes) + 1, since no probe sees a later key. Columns after a probe's own position are
    exactly 0; each row sums to 1 minus the share of sinks. Keys and queries are converted to
    float32 before the product.

    Raises `MissingCaptureError` if a probe's query was not captured.
    """
    at = torch.as_tensor(probes, dtype=torch.int64, device="cpu")
    keys, heads = capture.keys, capture.kv_heads
    after, stop = int(at.min()) + 1, int(at.max()) + 1
    queries = capture.queries_at(at).float() * capture.scale
    # One product per KV head for all query heads that share it, so K is never repeated.
    shared = rearrange(queries, "(g n) p d -> g (n p) d", g=heads)
    logits = shared @ keys[:, :stop].float().transpose(1, 2)
    logits = rearrange(logits, "g (n p) s -> (g n) p s", p=len(at))
    logits, sinks = capped(logits, capture.softcap), capture.sinks
    # All probes see the keys up to the earliest one; only the columns after it need a mask.
    unseen = torch.arange(after, stop) > at[:, None]
    logits[..., after:].masked_fill_(unseen.to(logits.device), -torch.inf)
    return softmax(logits, None if sinks is None else sinks[:, None, None])
