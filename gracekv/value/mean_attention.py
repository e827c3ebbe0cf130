"""Mean attention that a token receives from the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from einops import reduce

from gracekv.prefill import Needs, Prefill, Region
from gracekv.prefill.needs import prompt_samples
from gracekv.registry import bounded
from gracekv.value.attention import attention_sums
from gracekv.value.base import SCORERS, Scorer, TokenScores


@final
@SCORERS.register("mean_attention")
@dataclass(frozen=True, slots=False)
class MeanAttention(Scorer):
    """Mean causal attention from the prompt's queries, at most 1,024 of them, evenly spaced.

    H2O's column sums divided by the number of queries, so that the scale does not grow with the
    prompt and combines with other attention shares; of long prompts, from a sample of the queries.

    Source: ours, after Zhang et al. (2023), H2O, arXiv:2306.14048.

    Cost: attention rows of at most `max_queries` queries in every layer: O(L H Q T d).

    Attributes:
        max_queries: number of queries; the prompt's last position is always one of them.
    """

    works_sharded: ClassVar[bool] = True

    max_queries: int = bounded(1024, at_least=1)

    def needs(self) -> Needs:
        """Evenly spaced queries of the prompt."""
        return Needs(prompt_samples=self.max_queries)

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Group means, float32 [L, G, N], not normalised.

        Raises `MissingCaptureError` unless the queries of every position were captured.
        """
        length = prefill.spans.length
        count = min(self.max_queries, length)
        probes = prompt_samples(length, count)
        # Probes before the region do not see it.
        inside = probes[probes >= region.start]
        prefill = prefill.with_queries(inside)
        device, scores = prefill.keys[0].device, []
        for layer in range(prefill.layers):
            per_head = attention_sums(prefill, layer, inside, region) / count
            score = reduce(per_head, "(g n) t -> g t", "mean", g=prefill.kv_heads)
            scores.append(score.to(device))
        return TokenScores.from_scores(torch.stack(scores), shard=prefill.shard)
