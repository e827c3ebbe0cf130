"""SnapKV's score: attention from an observation window, smoothed along the context."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

from gracekv.prefill import LayerCapture, Needs, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer, attention_sums

Pooling = Literal["max", "avg", "none"]


@SCORERS.register("window_attention", works_sharded=True)
class WindowAttention(Scorer):
    """Mean attention from the last 32 prompt positions, max-pooled over 7 tokens (SnapKV).

    The mean over the window and over the query heads of a KV head comes before pooling. Only tokens
    of the region are pooled, not those of the prefix or the recent window.

    Source: Li et al. (2024), SnapKV, arXiv:2404.14469, in its benchmark setting. Ours: only the
    compressible region is pooled.

    Cost: attention rows of the window in every layer: O(L H T d) with a small constant, about 1 %
    of a prefill.

    Attributes:
        window: observation queries (SnapKV's benchmark setting, 32).
        pooling: "max" (SnapKV's benchmark setting; pads with -infinity), "avg" (pads with zeros
            that count in the denominator) or "none".
        kernel: pooling width in tokens, odd (SnapKV's benchmark setting, 7).
    """

    removed_fields = (("observation", "prompt_tail"),)
    window: int = bounded(32, at_least=1, hint="A number of positions; SnapKV's is 32.")
    pooling: Pooling = "max"
    kernel: int = bounded(
        7, at_least=1, odd=True, hint="SnapKV's is 7; give pooling='none' for no pooling."
    )

    def needs(self) -> Needs:
        """The queries of the window."""
        return Needs(last_queries=self.window)

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Pooled attention [G, N], not normalised."""
        observers = capture.spans.last(self.window)
        score = attention_sums(capture, observers, region, over="mean") / len(observers)
        if self.pooling == "none":
            return score
        pool = functional.max_pool1d if self.pooling == "max" else functional.avg_pool1d
        return pool(score, self.kernel, stride=1, padding=self.kernel // 2)
