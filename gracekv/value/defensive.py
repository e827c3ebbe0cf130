"""DefensiveKV's score: the largest attention from any query, at least its mean."""

from __future__ import annotations

import torch
from einops import reduce
from torch import Tensor
from torch.nn import functional

from gracekv.kernels.linalg import running_sums
from gracekv.prefill import LayerCapture, Needs, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer
from gracekv.value.critical import WrittenNorms
from gracekv.value.scissorhands import attention_probabilities


@SCORERS.register("defensive")
class Defensive(Scorer):
    """The largest attention from the window's queries and a group's heads, at least its mean.

    Attention is first pooled along the tokens, which keeps its sum. The score is
    multiplied by the token's |W_O v|_1, as a share of the sum over all KV heads of its layer.
    Tokens that hold the first 0.9 of the mean attention, less that on the last `window` tokens,
    come before all others of their layer. Sums and means include the prompt's prefix.

    Source: Feng et al. (2025), DefensiveKV, arXiv:2510.13334, with the numbers of its code. Ours:
    those first tokens rank by mean attention, since the code gives them one score and limits their
    number by the budget, which a scorer does not know.

    Cost: attention rows of the window in every layer, and one product of all values with the
    output projection, O(L H T d D).

    Attributes:
        window: observation queries at the prompt's end.
        kernel: pooling width in tokens, odd.
        mass: share of the mean attention that the first tokens hold.
    """

    window: int = bounded(32, at_least=1)
    kernel: int = bounded(5, at_least=1, odd=True)
    mass: float = bounded(0.9, above=0, at_most=1)

    def needs(self) -> Needs:
        """The window's queries and the norms."""
        return Needs(last_queries=self.window) | Needs.observed(WrittenNorms())

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """[G, N], not normalised; `MissingCaptureError` without the norms of projected values."""
        probes, groups = capture.spans.last(self.window), capture.kv_heads
        # Of all tokens: the prefix holds the attention sink.
        shares = attention_probabilities(capture, probes)[..., : region.end]
        pooled = functional.avg_pool1d(shares, self.kernel, stride=1, padding=self.kernel // 2)
        sums = shares.sum(dim=-1, keepdim=True) / pooled.sum(dim=-1, keepdim=True).clamp_min(1e-30)
        best = reduce(pooled * sums, "(g n) p t -> g t", "max", g=groups)
        # Places without an entry, before a passage, have no attention.
        tokens = (best > 0).sum(dim=-1, keepdim=True).clamp_min(1)
        best = torch.maximum(best, best.sum(dim=-1, keepdim=True) / tokens)
        norms = capture.observation(WrittenNorms())[:, region.start : region.end].to(best)
        scores = best[:, region.start :] * norms / norms.sum(dim=0).clamp_min(1e-30)
        mean = reduce(shares, "(g n) p t -> g t", "mean", g=groups)
        order = mean.sort(dim=-1, descending=True, stable=True)
        held = running_sums(order.values) / mean.sum(dim=-1, keepdim=True).clamp_min(1e-30)
        near = shares[..., -self.window :].sum(dim=-1).mean()
        ranks = torch.arange(region.end, 0, -1, device=best.device, dtype=torch.float32)
        # Above all scores, and the same in all layers: heads take turns.
        first = torch.where(held < self.mass - near, 2.0 + ranks, 0.0)
        first = torch.zeros_like(best).scatter_(-1, order.indices, first)
        return torch.maximum(scores, first[:, region.start :])
