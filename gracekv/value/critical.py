"""CriticalKV's order of tokens: half by a score, half by what their values write."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

import torch

from gracekv.errors import MissingCaptureError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.rank_scores import rank_scores
from gracekv.value.window_attention import WindowAttention


@final
@SCORERS.register("critical")
@dataclass(frozen=True, slots=False)
class Critical(Scorer):
    """Half of a head's tokens by a score, the rest by (score + epsilon) |W_O v|_1 (CriticalKV).

    The norm is the mean over a KV head's query heads. The choice of a budget holds that of every
    smaller one, so that one order of the tokens has them all as its first tokens. Scores are ranks
    under that order; a head's scores sum to 1.

    Source: Feng et al. (2025), CriticalKV, arXiv:2502.03805, with the numbers of its code in
    kvpress. Ours: the order.

    Cost: that of `scorer`, one product of all values with the output projection, O(L H T d D), and
    one merge of two orders a head in Python.

    Attributes:
        scorer: the score, not negative (SnapKV's window attention).
        first_stage: share of a head's budget that goes by the score alone (the published 0.5).
        epsilon: added to the score in the second stage (the published 1e-4).
    """

    scorer: Scorer = field(default_factory=WindowAttention)
    first_stage: float = bounded(0.5, at_least=0, at_most=1, hint="The published share is 0.5.")
    epsilon: float = bounded(1e-4, at_least=0, hint="The published value is 1e-4.")

    def needs(self) -> Needs:
        """What the score needs, and the norms."""
        return self.scorer.needs() | Needs(written_norms=True)

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Ranks as scores. Raises `MissingCaptureError` without the norms of projected values."""
        if prefill.written_norms is None:
            raise MissingCaptureError(
                "Critical reads norms of projected values, which were not captured. Capture for "
                "the pipeline that you run: gracekv.capture(model, prompt, needs=pipeline.needs())."
            )
        first = self.scorer(prefill, region)
        norms = prefill.written_norms[..., region.start : region.end].to(first.scores.device)
        second = (first.scores + self.epsilon) * norms
        # Ties toward the earlier token: stable sorts.
        one, two = (
            scores.sort(dim=-1, descending=True, stable=True).indices
            for scores in (first.scores, second)
        )
        heads = zip(one.flatten(0, 1).tolist(), two.flatten(0, 1).tolist(), strict=True)
        merged = torch.tensor([merged_order(*orders, self.first_stage) for orders in heads])
        order = merged.view(one.shape).to(one.device)
        return TokenScores.from_scores(rank_scores(order), first.column_sums)


def merged_order(first: list[int], second: list[int], share: float) -> list[int]:
    """The order of one head's tokens whose first b are its two-stage choice of b, for every b.

    The choice: the floor(share b) first tokens of `first`, at least one of them if `share` is not
    0, and of the others the first ones of `second`.

    Args:
        first: tokens from first to last.
        second: the same tokens in another order.
        share: between 0 and 1.
    """
    chosen: dict[int, None] = {}  # keeps its order
    rest, used = iter(second), 0
    for budget in range(1, len(first) + 1):
        if share > 0 and used < max(1, math.floor(share * budget)):
            chosen.setdefault(first[used])
            used += 1
        while len(chosen) < budget:
            chosen.setdefault(next(rest))
    return list(chosen)
