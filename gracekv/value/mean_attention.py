"""Mean attention that a token receives from the prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.kernels.uploads import filled
from gracekv.prefill import LayerCapture, Needs, PromptSpans, Region
from gracekv.prefill.needs import prompt_samples
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer, attention_sums


@SCORERS.register("mean_attention", works_sharded=True)
class MeanAttention(Scorer):
    """Mean causal attention from the prompt's queries, at most 1,024 of them, evenly spaced.

    H2O's column sums divided by the number of queries, so the scale does not grow with the prompt
    and can be combined with other attention shares. Long prompts use a sample of the queries.

    Source: ours, after Zhang et al. (2023), H2O, arXiv:2306.14048.

    Cost: attention rows of at most `max_queries` queries in every layer: O(L H Q T d).

    Attributes:
        max_queries: number of queries; the prompt's last position is always one of them.
    """

    max_queries: int = bounded(1024, at_least=1)

    def needs(self) -> Needs:
        """Evenly spaced queries of the prompt."""
        return Needs(prompt_samples=self.max_queries)

    def _probes(self, spans: PromptSpans, region: Region) -> Tensor:
        """Evenly spaced positions, int64 [P], except those before the region."""
        probes = prompt_samples(spans.length, self.max_queries)
        return probes[probes >= region.start]

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Group means [G, N], not normalised."""
        probes = self._probes(capture.spans, region)
        each = 1.0 / min(self.max_queries, capture.spans.length)
        weights = filled(len(probes), each, torch.float32, capture.keys.device)
        return attention_sums(capture, probes, region, weights, over="mean")
