"""A score times the length of the value that it stands for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch

from gracekv.prefill import Needs, Prefill, Region
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.evidence import mean_evidence
from gracekv.value.read_ahead import ReadAhead


@final
@SCORERS.register("value_norm")
@dataclass(frozen=True, slots=False)
class ValueNorm(Scorer):
    """Another score times ||v||: what a dropped token takes from the head's output.

    Source: Guo et al. (2024), VATP, arXiv:2406.12335; the Euclidean norm, as in Devoto et al.
    (2025), arXiv:2510.00636, in place of its l1.

    Cost: one pass over the values.

    Attributes:
        score: what is weighted.
    """

    score: Scorer = field(default_factory=ReadAhead)

    def needs(self) -> Needs:
        """What the score needs."""
        return self.score.needs()

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Weighted scores, float32 [L, G, N], not normalised."""
        scores = self.score(prefill, region)
        device = scores.tokens.device
        norms = torch.stack(
            [
                value[:, region.start : region.end].float().norm(dim=-1).to(device)
                for value in prefill.values
            ]
        )
        tokens = scores.tokens * norms
        return TokenScores(tokens, mean_evidence(tokens), scores.columns)
