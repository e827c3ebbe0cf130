"""CriticalKV's token order: half by a score, half by projected value norms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from einops import rearrange
from torch import Tensor

from gracekv.prefill import LayerCapture, Needs, Prefill, PromptSpans, Region
from gracekv.prefill.observer import Accumulator, LayerObserver, Projection, TokenColumns, TokenRun
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer, part_scores, rank_scores
from gracekv.value.window_attention import WindowAttention

# Rows per matrix product with a head's projection.
_ROWS = 1024


@dataclass(frozen=True)
class WrittenNorms(LayerObserver):
    """l1 norms of projected values, float32 [L, G, T]: mean over a group of ||W_O^h v_t||_1.

    Source: Feng et al. (2025), CriticalKV, arXiv:2502.03805.
    """

    reads = frozenset({"projection"})
    part = "projections"

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        return prefill.layers, prefill.kv_heads, prefill.spans.length

    def accumulator(self, layer: int, layers: int, spans: PromptSpans) -> Accumulator:
        return _Norms(spans)


class _Norms(TokenColumns):
    def add(self, run: TokenRun) -> None:
        assert run.projection is not None  # it is read
        values = run.values[:, run.start : run.end]
        written = written_norms(run.projection, values, len(run.queries))
        self.columns(values)[:, run.start : run.end] = written


@SCORERS.register("critical")
class Critical(Scorer):
    """Half of a head's tokens by score, the rest by (score + epsilon) |W_O v|_1 (CriticalKV).

    The norm is the mean over a KV head's query heads. The choice for a budget contains that for
    every smaller one, so the choices for all budgets are prefixes of one token order. Scores are
    ranks in that order; a head's scores sum to 1.

    Source: Feng et al. (2025), CriticalKV, arXiv:2502.03805, with the numbers of its code in
    kvpress. Ours: the order.

    Cost: that of `scorer`, one product of all values with the output projection, O(L H T d D), and
    one merge of two orders per head in Python.

    Attributes:
        scorer: the score, non-negative (SnapKV's window attention).
        first_stage: share of a head's budget chosen by the score alone (the published 0.5).
        epsilon: added to the score in the second stage (the published 1e-4).
    """

    scorer: Scorer = field(default_factory=WindowAttention)
    first_stage: float = bounded(0.5, at_least=0, at_most=1, hint="The published share is 0.5.")
    epsilon: float = bounded(1e-4, at_least=0, hint="The published value is 1e-4.")

    def needs(self) -> Needs:
        """The needs of `scorer`, and the norms."""
        return self.scorer.needs() | Needs.observed(WrittenNorms())

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Ranks as scores [G, N]; `MissingCaptureError` without the norms of projected values."""
        first = part_scores(self.scorer, capture, region, memory)
        norms = capture.observation(WrittenNorms())[:, region.start : region.end]
        second = (first + self.epsilon) * norms.to(first.device)
        # Ties toward the earlier token: stable sorts.
        sorts = (x.sort(dim=-1, descending=True, stable=True) for x in (first, second))
        heads = zip(*(x.indices.tolist() for x in sorts), strict=True)
        order = torch.tensor([merged_order(one, two, self.first_stage) for one, two in heads])
        return rank_scores(order.to(first.device))


def merged_order(first: list[int], second: list[int], share: float) -> list[int]:
    """The order of one head's tokens whose first b are the two-stage choice of b, for every b.

    The choice is the first floor(share b) tokens of `first`, at least one if `share` is not 0, then
    the first of the others in `second`.

    Args:
        first: tokens from first to last.
        second: the same tokens in another order.
        share: between 0 and 1.
    """
    chosen: dict[int, None] = {}  # in insertion order
    rest, used = iter(second), 0
    for budget in range(1, len(first) + 1):
        if share > 0 and used < max(1, math.floor(share * budget)):
            chosen.setdefault(first[used])
            used += 1
        while len(chosen) < budget:
            chosen.setdefault(next(rest))
    return list(chosen)


def written_norms(projection: Projection, values: Tensor, heads: int) -> Tensor:
    """[G, T] float32: mean over a KV head's query heads h of ||W_O^h v_t||_1.

    Args:
        projection: the output projection of the layer.
        values: [G, T, d]; coordinates beyond the projection's are zeros.
        heads: H.

    Source: Feng et al. (2025), CriticalKV, arXiv:2502.03805.
    """
    groups, weight = len(values), projection.weight(values).float()
    by_head = rearrange(weight, "o (g n d) -> g n d o", g=groups, n=heads // groups)
    rows = values[..., : by_head.shape[2]].float()
    norms = torch.zeros(values.shape[:2], device=values.device, dtype=torch.float32)
    for own, row, norm in zip(by_head, rows, norms, strict=True):
        for head in own:
            for part, place in zip(row.split(_ROWS), norm.split(_ROWS), strict=True):
                place += (part @ head).abs().sum(dim=-1) / len(own)
    return norms
