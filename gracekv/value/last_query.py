"""TOVA's score: the attention of the prompt's last query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from gracekv.prefill import Needs, Prefill, Region
from gracekv.value.attention import attention_sums
from gracekv.value.base import SCORERS, Scorer, TokenScores


@final
@SCORERS.register("last_query")
@dataclass(frozen=True, slots=False)
class LastQuery(Scorer):
    """Attention of the prompt's last position, the mean over all heads of a layer (TOVA).

    All KV heads of a layer have the same scores.

    Source: Oren et al. (2024), TOVA, arXiv:2401.06104. Ours: one eviction after prefill instead of
    one a step.

    Cost: one attention row in every layer, O(L H T d).
    """

    def needs(self) -> Needs:
        """The last query."""
        return Needs(last_queries=1)

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Attention shares, not normalised. Raises `MissingCaptureError` without the last query."""
        last = prefill.spans.last(1)
        prefill, device = prefill.with_queries(last), prefill.keys[0].device
        rows = [
            attention_sums(prefill, layer, last, region).mean(dim=0).to(device)
            for layer in range(prefill.layers)
        ]
        scores = torch.stack(rows)[:, None].expand(-1, prefill.kv_heads, -1)
        return TokenScores.from_scores(scores.contiguous())
