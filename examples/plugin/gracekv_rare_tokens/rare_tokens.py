"""Tokens by how rarely they occur in the context."""

from __future__ import annotations

from torch import Tensor

from gracekv.errors import MissingCaptureError
from gracekv.prefill import Prefill, Region
from gracekv.registry import bounded
from gracekv.value import SCORERS, LayerScorer, Memory


@SCORERS.register("rare_tokens")
class RareTokens(LayerScorer):
    """Tokens that occur once before those that occur often; all heads alike.

    Source: ours.

    Cost: one count of the context's token ids.

    Attributes:
        power: of 1 / (number of occurrences).
    """

    power: float = bounded(1.0, above=0)

    def layer(self, prefill: Prefill, layer: int, region: Region, memory: Memory) -> Tensor:
        """Scores [G, N], the same in every head; `MissingCaptureError` without token ids."""
        if prefill.token_ids is None:
            raise MissingCaptureError("RareTokens needs token ids; this prefill has none.")
        ids = prefill.token_ids[region.start : region.end]
        _, which, count = ids.unique(return_inverse=True, return_counts=True)
        rarity = count[which].float().pow(-self.power).to(prefill.keys[layer].device)
        return rarity.repeat(prefill.kv_heads, 1)
