"""Tokens by how rarely they occur in the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gracekv.errors import MissingCaptureError
from gracekv.prefill import Prefill, Region
from gracekv.registry import bounded
from gracekv.value import SCORERS, Scorer, TokenScores


@final
@SCORERS.register("rare_tokens")
@dataclass(frozen=True)
class RareTokens(Scorer):
    """Tokens that occur once before those that occur often; all heads alike.

    Source: ours.

    Cost: one count of the context's token ids.

    Attributes:
        power: of 1 / (number of occurrences).
    """

    power: float = bounded(1.0, above=0)

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Scores [L, G, N], the same in every head, and their share of the sum [N]."""
        if prefill.token_ids is None:
            raise MissingCaptureError("RareTokens needs token ids; this prefill has none.")
        ids = prefill.token_ids[region.start : region.end]
        _, which, count = ids.unique(return_inverse=True, return_counts=True)
        rarity = count[which].float().pow(-self.power).to(prefill.keys[0].device)
        heads = (prefill.layers, prefill.kv_heads, len(rarity))
        return TokenScores(rarity.expand(heads).contiguous(), seed_scores=rarity / rarity.sum())
