"""The inverse norm of a token's key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from gracekv.prefill import Prefill, Region
from gracekv.value.base import SCORERS, Scorer, TokenScores


@final
@SCORERS.register("key_norm")
@dataclass(frozen=True, slots=False)
class KeyNorm(Scorer):
    """1 / |k|: keys of small norm attract attention, whatever the query (Knorm).

    No query is read, so neither is the question.

    Source: Devoto et al. (2024), arXiv:2406.11430. Ours: the inverse, since scores are not
    negative; the order is that of -|k|.

    Cost: one pass over the keys.
    """

    works_sharded: ClassVar[bool] = True

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Inverse norms, not normalised."""
        device = prefill.keys[0].device
        norms = torch.stack(
            [keys[:, region.start : region.end].float().norm(dim=-1).to(device)
             for keys in prefill.keys]
        )  # fmt: skip
        return TokenScores.from_scores(1 / norms.clamp_min(1e-12), shard=prefill.shard)
