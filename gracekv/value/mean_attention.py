"""The attention that a token receives on average while the prompt is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from einops import reduce

from gracekv.errors import ConfigError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.prefill.needs import prompt_samples
from gracekv.value.attention import received
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.seed_scores import mean_seed_scores


@final
@SCORERS.register("mean_attention")
@dataclass(frozen=True, slots=False)
class MeanAttention(Scorer):
    """Mean causal attention from the prompt's queries, at most 1,024 of them, evenly spaced.

    H2O's column sums as a share of attention, whose scale does not grow with the prompt, so that it
    mixes with other shares; and from a sample of the queries once the prompt is long.

    Source: ours, after Zhang et al. (2023), H2O, arXiv:2306.14048.

    Cost: attention rows of at most `max_queries` queries in every layer: O(L H Q T d).

    Attributes:
        max_queries: most queries; the prompt's last position is always one of them.

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    max_queries: int = 1024

    def __post_init__(self) -> None:
        if self.max_queries < 1:
            raise ConfigError(
                f"MeanAttention.max_queries takes a number of queries >= 1; got "
                f"{self.max_queries!r}."
            )

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
        # What comes before the region sees none of it.
        inside = probes[probes >= region.start]
        prefill = prefill.with_queries(inside)
        device, scores = prefill.keys[0].device, []
        for layer in range(prefill.layers):
            per_head = received(prefill, layer, inside, region) / count
            score = reduce(per_head, "(g n) t -> g t", "mean", g=prefill.kv_heads)
            scores.append(score.to(device))
        tokens = torch.stack(scores)
        return TokenScores(tokens, mean_seed_scores(tokens))
