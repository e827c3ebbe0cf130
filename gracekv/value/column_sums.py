"""H2O's score: the sum of the attention that a token receives from the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import reduce
from torch import Tensor

from gracekv.kernels.softmax_sums import softmax_columns
from gracekv.prefill import LayerCapture, Needs, Prefill, PromptSpans, Region
from gracekv.prefill.observer import Accumulator, LayerObserver, TokenColumns, TokenRun
from gracekv.value.base import SCORERS, Memory, Scorer


@dataclass(frozen=True)
class ReceivedAttention(LayerObserver):
    """The attention that each position receives from all queries, float32 [L, H, T].

    One causal attention pass without values. Source: the column sums of H2O (Zhang et al., 2023,
    arXiv:2306.14048).
    """

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        return prefill.layers, prefill.query_heads, prefill.spans.length

    def accumulator(self, layer: int, layers: int, spans: PromptSpans) -> Accumulator:
        return _Columns(spans)


class _Columns(TokenColumns):
    def add(self, run: TokenRun) -> None:
        keys = run.keys[:, : run.end]
        seen = torch.arange(run.start + 1, run.end + 1, device=keys.device)
        own = softmax_columns(run.queries, keys, seen, **run.softmax_args)
        self.columns(run.queries)[:, : run.end].add_(own)


@SCORERS.register("column_sums", works_sharded=True)
class ColumnSums(Scorer):
    """Sum of the causal attention from all prompt queries, mean over a KV head's group (H2O).

    A sum, not an average: early tokens are seen by more queries and score higher, as published.

    Source: Zhang et al. (2023), H2O, arXiv:2306.14048. Ours: one eviction after prefill instead of
    one per step.

    Cost: one more attention pass without values over the prompt: O(L H T² d), 7 % of a prefill at
    2,000 tokens on a CPU with numba.
    """

    def needs(self) -> Needs:
        return Needs.observed(ReceivedAttention())

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Group means of the sums [G, N], not normalised."""
        columns = capture.observation(ReceivedAttention())
        inside = columns[:, region.start : region.end].to(capture.keys.device)
        return reduce(inside, "(g n) t -> g t", "mean", g=capture.kv_heads)
