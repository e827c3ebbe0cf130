"""A score times the length of the value that it stands for, absolute or within its layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch

from gracekv.errors import ConfigError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.read_ahead import ReadAhead
from gracekv.value.seed_scores import mean_seed_scores


@final
@SCORERS.register("value_norm")
@dataclass(frozen=True, slots=False)
class ValueNorm(Scorer):
    """Another score times ||v||: what a dropped token takes from the head's output.

    Values grow from layer to layer, and so does what they are added to: by absolute norms the first
    layers lose their entries first, by norms relative to the layer's mean they keep too many once
    few are left. Halfway serves from 1.5x to 64x.

    Source: Guo et al. (2024), VATP, arXiv:2406.12335; the Euclidean norm, as in Devoto et al.
    (2025), arXiv:2510.00636, in place of its l1. Relative norms are ours.

    Cost: one pass over the values.

    Attributes:
        score: what is weighted.
        relative: power of the layer's mean norm over the region that divides: 0 absolute norms, 1
            relative ones, 0.5 their geometric mean.

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    score: Scorer = field(default_factory=ReadAhead)
    relative: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.relative <= 1:
            raise ConfigError(
                f"ValueNorm.relative takes a number from 0 (absolute norms) to 1 (relative to the "
                f"layer's mean); got {self.relative!r}."
            )

    def needs(self) -> Needs:
        """What the score needs."""
        return self.score.needs()

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Weighted scores, float32 [L, G, N], not normalised."""
        scores = self.score(prefill, region)
        device = scores.scores.device
        norms = torch.stack(
            [
                value[:, region.start : region.end].float().norm(dim=-1).to(device)
                for value in prefill.values
            ]
        )
        if self.relative > 0:
            layer = norms.mean(dim=(1, 2), keepdim=True)
            norms = norms / layer.clamp_min(1e-12) ** self.relative
        tokens = scores.scores * norms
        return TokenScores(tokens, mean_seed_scores(tokens), scores.column_sums)
