"""Scores tokens by how rarely they occur in the context."""

from __future__ import annotations

from torch import Tensor

from gracekv.errors import MissingCaptureError
from gracekv.prefill import LayerCapture, Region
from gracekv.registry import bounded
from gracekv.value import SCORERS, Memory, Scorer


@SCORERS.register("rare_tokens")
class RareTokens(Scorer):
    """Rare tokens score higher than frequent ones, the same in all heads.

    Source: ours.

    Cost: one count of the context's token ids.

    Attributes:
        power: power of 1 / (number of occurrences).
    """

    power: float = bounded(1.0, above=0)

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Scores [G, N], the same in every head; `MissingCaptureError` without token ids."""
        if capture.info.token_ids is None:
            raise MissingCaptureError("RareTokens needs token ids; this prefill has none.")
        ids = capture.info.token_ids[region.start : region.end]
        _, which, count = ids.unique(return_inverse=True, return_counts=True)
        rarity = count[which].float().pow(-self.power).to(capture.keys.device)
        return rarity.repeat(capture.kv_heads, 1)
