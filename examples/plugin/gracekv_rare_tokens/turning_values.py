"""A scorer with its own capture: how far a token's value turns from the one before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.prefill import LayerCapture, LayerObserver, Needs, Prefill, PromptSpans, Region
from gracekv.prefill.observer import Accumulator, TokenRun
from gracekv.value import SCORERS, Memory, Scorer


@dataclass(frozen=True)
class ValueTurns(LayerObserver):
    """1 - cosine of each value and the one before it, float32 [L, G, T]; 0 for the first."""

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        return prefill.layers, prefill.kv_heads, prefill.spans.length

    def accumulator(self, layer: int, layers: int, spans: PromptSpans) -> Accumulator:
        return _Turns(spans)


class _Turns:
    def __init__(self, spans: PromptSpans) -> None:
        self._spans, self._turns = spans, torch.empty(0)

    def add(self, run: TokenRun) -> None:
        if not self._turns.numel():
            self._turns = torch.zeros(len(run.values), self._spans.length, device=run.values.device)
        # `values` holds everything up to the run's end, so also the token before the run.
        first = max(run.start, 1)
        seen = run.values[:, first - 1 : run.end].float()
        cosines = functional.cosine_similarity(seen[:, 1:], seen[:, :-1], dim=-1)
        self._turns[:, first : run.end] = 1 - cosines

    def result(self) -> Tensor:
        return self._turns


@SCORERS.register("turning_values")
@dataclass(frozen=True)
class TurningValues(Scorer):
    """Tokens whose value turns away from the previous one score higher, head by head.

    Source: ours.

    Cost: one product of each value with the one before it, during the prefill.
    """

    def needs(self) -> Needs:
        return Needs.observed(ValueTurns())

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Scores [G, N]; `MissingCaptureError` if the values' turns were not captured."""
        turns = capture.observation(ValueTurns())[:, region.start : region.end]
        return turns.clamp_min(0)
