"""How far a token's key points away from the mean direction of all keys."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from gracekv.prefill import LayerCapture, Region
from gracekv.value.base import SCORERS, Memory, Scorer


@SCORERS.register("key_difference", works_sharded=True)
class KeyDifference(Scorer):
    """1 - cos(k, mean of the normalised keys): keeps tokens unlike the rest (KeyDiff).

    The mean is over prefix and context; no query and nothing after the context is read.

    Source: Park et al. (2025), KeyDiff, arXiv:2504.15364. Ours: one eviction after prefill instead
    of one per block.

    Cost: two passes over the keys.
    """

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """One minus the cosine [G, N], between 0 and 2."""
        unit = functional.normalize(capture.keys.float(), dim=-1)
        seen = slice(capture.spans.past, capture.spans.context_end)
        mean = functional.normalize(unit[:, seen].mean(dim=1, keepdim=True), dim=-1)
        return (1 - (unit[:, region.start : region.end] * mean).sum(dim=-1)).clamp_min(0)
