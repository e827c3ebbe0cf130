"""TOVA's score: the attention of the prompt's last query."""

from __future__ import annotations

from torch import Tensor

from gracekv.prefill import LayerCapture, Needs, Region
from gracekv.value.base import SCORERS, Memory, Scorer, attention_sums


@SCORERS.register("last_query")
class LastQuery(Scorer):
    """Attention of the prompt's last position, averaged over all heads of a layer (TOVA).

    All KV heads of a layer have the same scores.

    Source: Oren et al. (2024), TOVA, arXiv:2401.06104. Ours: one eviction after prefill instead of
    one per step.

    Cost: one attention row in every layer, O(L H T d).
    """

    def needs(self) -> Needs:
        """The last query."""
        return Needs(last_queries=1)

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Attention shares [G, N], not normalised."""
        shares = attention_sums(capture, capture.spans.last(1), region).mean(dim=0)
        return shares.expand(capture.kv_heads, -1)
