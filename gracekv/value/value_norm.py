"""A score times the norm of the token's value, absolute or relative to its layer."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from gracekv.prefill import LayerCapture, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer, part_scores
from gracekv.value.read_ahead import ReadAhead


@SCORERS.register("value_norm", works_sharded=True)
class ValueNorm(Scorer):
    """Another score times ||v||: how much the head's output changes if a token is dropped.

    Norms of values grow with depth, and so does the residual stream. Absolute norms drop the
    entries of the first layers first; norms relative to the layer's mean keep too many of them at
    high ratios. The geometric mean of both (relative=0.5) works from 1.5x to 64x.

    Source: Guo et al. (2024), VATP, arXiv:2406.12335; the Euclidean norm, as in Devoto et al.
    (2025), arXiv:2510.00636, in place of its l1. Relative norms are ours.

    Cost: one pass over the values.

    Attributes:
        scorer: the score that is multiplied.
        power: exponent of the norms.
        relative: exponent of the layer's mean norm, by which norms are divided: 0 for absolute
            norms, 1 for relative ones, 0.5 for their geometric mean.
    """

    reads_past = True

    scorer: Scorer = field(default_factory=ReadAhead)
    power: float = bounded(1.0, above=0)
    relative: float = bounded(
        0.0, at_least=0, at_most=1, hint="0: absolute norms; 1: relative to the layer's mean."
    )

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Weighted scores [G, N], not normalised."""
        scores = part_scores(self.scorer, capture, region, memory)
        inside = capture.values[:, region.start : region.end]
        # float64 stays float64.
        dtype = torch.promote_types(inside.dtype, torch.float32)
        norms = torch.linalg.vector_norm(inside, dim=-1, dtype=dtype).float()
        own = norms[:, max(0, capture.spans.context_start - region.start) :]
        norms = norms / capture.shard.mean(own.mean()).clamp_min(1e-12) ** self.relative
        weighted: Tensor = scores * (norms if self.power == 1 else norms**self.power)
        return weighted
