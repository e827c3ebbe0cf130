"""The inverse norm of a token's key."""

from __future__ import annotations

from torch import Tensor

from gracekv.prefill import LayerCapture, Region
from gracekv.value.base import SCORERS, Memory, Scorer


@SCORERS.register("key_norm", works_sharded=True)
class KeyNorm(Scorer):
    """1 / |k|: keys of small norm attract attention from any query (Knorm).

    No query is read, not even the question's.

    Source: Devoto et al. (2024), arXiv:2406.11430. Ours: the inverse, since scores must be
    non-negative; the order is that of -|k|.

    Cost: one pass over the keys.
    """

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Inverse norms [G, N], not normalised."""
        norms = capture.keys[:, region.start : region.end].float().norm(dim=-1)
        inverse: Tensor = 1 / norms.clamp_min(1e-12)
        return inverse
