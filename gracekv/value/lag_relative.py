"""LagKV's score: how much a token differs from its neighbours, on the scale of the next ones."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.prefill import LayerCapture, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer


@SCORERS.register("lag_relative", works_sharded=True)
class LagRelative(Scorer):
    """Spread of a token's channels, on the scale of the next 128 tokens' channels (LagKV).

    The tokens after the sinks are cut into partitions. Keys and values of a partition are scaled to
    the range of the next one, channel by channel; the standard deviation over channels, after a
    softmax over the partition, is averaged over keys and values. Each partition keeps the same
    share: scores are ranks in it. The last partition, which has no next one, and the tokens after
    it are kept before all others. No query and nothing after the context is read.

    Source: Liang et al. (2025), LagKV, arXiv:2504.04704. Ours: one eviction after prefill to any
    budget; if that is smaller than the kept end, the end's latest tokens stay.

    Cost: a few passes over keys and values.

    Attributes:
        sinks: number of first prompt tokens, which score higher than all others (kvpress's 4).
        lag: tokens per partition (LagKV's 128). A context of less than two partitions keeps its
            latest tokens.
    """

    sinks: int = bounded(4, at_least=0, hint="kvpress's is 4.")
    lag: int = bounded(128, at_least=2, hint="LagKV's is 128.")

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Ranks below 1 [G, N], between 1 and 2 in the kept end, 3 for sinks."""
        spans, keys, values = capture.spans, capture.keys, capture.values
        first = min(max(spans.past, self.sinks), spans.context_end)
        length = spans.context_end - first
        parts = length // self.lag
        ranked = (parts - 1) * self.lag if parts >= 2 else 0
        whole = keys.new_full((capture.kv_heads, spans.context_end), 3.0, dtype=torch.float32)
        # The later, the better.
        later = 1 + torch.arange(1, length + 1).float() / max(1, length)
        whole[:, first:] = later.to(keys.device)
        if ranked:
            used, dim = slice(first, first + parts * self.lag), capture.info.entry_dim
            both = [_spread(x[:, used, :dim].float(), self.lag) for x in (keys, values)]
            order = (both[0] + both[1]).sort(dim=-1, descending=True, stable=True).indices
            ranks = (self.lag - 1 - order.argsort(dim=-1)).float() / self.lag
            whole[:, first : first + ranked] = ranks.flatten(1)
        return whole[:, region.start : region.end]


def _spread(states: Tensor, lag: int) -> Tensor:
    """[G, P - 1, lag] of states [G, P * lag, d]: each partition scaled to the range of the next."""
    parts = states.unflatten(1, (-1, lag))
    following = parts[:, 1:]
    low, high = following.amin(dim=2, keepdim=True), following.amax(dim=2, keepdim=True)
    scaled = (parts[:, :-1] - low) / (high - low).clamp_min(1e-12)
    shares: Tensor = scaled.std(dim=-1).softmax(dim=-1)
    return shares
