"""SnapKV's score: attention from an observation window, smoothed along the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from einops import reduce
from torch import Tensor
from torch.nn import functional

from gracekv.errors import ConfigError
from gracekv.prefill import Needs, Prefill, PromptSpans, Region
from gracekv.value.attention import received
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.seed_scores import mean_seed_scores

Observation = Literal["prompt_tail", "context_tail"]
Pooling = Literal["max", "avg", "none"]


@final
@SCORERS.register("window_attention")
@dataclass(frozen=True, slots=False)
class WindowAttention(Scorer):
    """Mean attention from the last 32 prompt positions, max-pooled over 7 tokens (SnapKV).

    The mean over the window and over the query heads of a KV head comes before pooling, and
    pooling sees the region alone, so that nothing leaks in from prefix or recent window.

    Source: Li et al. (2024), SnapKV, arXiv:2404.14469, in its benchmark setting. Ours: pooling sees
    the compressible region alone.

    Cost: attention rows of the window in every layer: O(L H T d) with a small constant, about 1 %
    of a prefill.

    Attributes:
        window: observation queries (SnapKV's benchmark setting, 32).
        observation: where they end: "prompt_tail" sees the question (SnapKV), "context_tail" is
            question-agnostic.
        pooling: "max" (SnapKV's benchmark setting; pads with -infinity), "avg" (pads with zeros
            that count in the denominator) or "none".
        kernel: pooling width in tokens, odd (SnapKV's benchmark setting, 7).

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    window: int = 32
    observation: Observation = "prompt_tail"
    pooling: Pooling = "max"
    kernel: int = 7

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(
                f"WindowAttention.window takes a number of positions >= 1; got {self.window!r}. "
                f"SnapKV's is 32."
            )
        for name, allowed in (("observation", Observation), ("pooling", Pooling)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(
                    f"WindowAttention.{name} takes one of "
                    f"{', '.join(map(repr, get_args(allowed)))}; got {getattr(self, name)!r}."
                )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(
                f"WindowAttention.kernel takes an odd number of tokens >= 1, so that it has a "
                f"middle; got {self.kernel!r}. SnapKV's is 7; give pooling='none' for no pooling."
            )

    def needs(self) -> Needs:
        """The window's queries, wherever it ends; no others."""
        return Needs(last_queries=self.window)

    def observers(self, spans: PromptSpans) -> range:
        """Absolute positions of the observation queries; fewer than `window` if all there is."""
        if self.observation == "prompt_tail":
            return range(max(0, spans.length - self.window), spans.length)
        return range(max(spans.context_start, spans.context_end - self.window), spans.context_end)

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Pooled scores, not normalised: layers and heads stay comparable as attention mass.

        Raises `MissingCaptureError` without the observers' queries.
        """
        observers = self.observers(prefill.spans)
        prefill = prefill.with_queries(observers)
        device = prefill.keys[0].device
        scores = []
        for layer in range(prefill.layers):
            per_head = received(prefill, layer, observers, region) / len(observers)
            score = reduce(per_head, "(g n) t -> g t", "mean", g=prefill.kv_heads)
            scores.append(self._pooled(score).to(device))
        tokens = torch.stack(scores)
        return TokenScores(tokens, mean_seed_scores(tokens))

    def _pooled(self, score: Tensor) -> Tensor:
        """[G, N] -> [G, N]."""
        if self.pooling == "max":
            return functional.max_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)
        if self.pooling == "avg":
            return functional.avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)
        return score
