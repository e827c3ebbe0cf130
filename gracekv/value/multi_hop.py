"""The paper's relevance: attention from the question, propagated along attention."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.prefill import LayerCapture, Needs, Prefill, Region, depth_layers
from gracekv.registry import bounded
from gracekv.value.base import (
    SCORERS,
    Memory,
    ProbeScorer,
    TokenScores,
    attention_sums,
    mean_seed_scores,
)


@SCORERS.register("multi_hop", works_sharded=True)
class MultiHop(ProbeScorer):
    """Attention from the question, plus two hops along the attention of the tokens it attends to.

    R = (1 - lambda) s-hat + lambda d-hat (Eq. (V6)). A head's R sums to 1, up to epsilon over its
    attention to the region. If no hop finds a new token, R is s-hat (ours: the formula would only
    scale every score by 1 - lambda).

    Source: Eqs. (V2) to (V6); departures 3. Ours: seeds of later hops, and R if no hop finds a new
    token.

    Cost: attention rows of at most 48 probes in every layer and of 64 seeds per hop in two layers:
    O(L H T d) with small constants, about 1 % of a prefill.

    Attributes:
        question_probes: last question positions whose attention counts, "Direct relevance".
        tail_probes: last prompt positions whose attention counts, "Direct relevance".
        hops: R_hop, Eq. (V5); 0 uses direct relevance alone.
        decay: rho, weight of a hop relative to the one before, Eq. (V5).
        lambda_graph: share of the hops in R, Eq. (V6).
        depths: relative depths of the layers whose attention hops use, "Preliminaries".
        seed_mass: eta_seed, share of the total score that a hop's seeds hold, "Direct relevance";
            using it for later hops is ours.
        max_seeds: M_seed, maximum number of seeds per hop, "Direct relevance"; using it for later
            hops is ours.
        epsilon: keeps denominators from 0; the value is ours, small enough that R of a head sums to
            1 even if the context receives a millionth of its attention.
    """

    hops: int = bounded(2, at_least=0, at_most=3, hint="Give 0 for direct relevance alone.")
    decay: float = bounded(0.5, at_least=0, at_most=1)
    lambda_graph: float = bounded(0.3, at_least=0, at_most=1)
    depths: tuple[float, ...] = bounded(
        (0.5, 0.75), at_least=0, at_most=1, hint="A relative depth: 0 first layer, 1 last layer."
    )
    seed_mass: float = bounded(0.9, above=0, at_most=1, hint="Give hops=0 to do without hops.")
    max_seeds: int = bounded(64, at_least=1, hint="Give hops=0 to do without hops.")
    epsilon: float = bounded(1e-12, above=0, at_most=1e-3, hint="It keeps denominators from 0.")

    def needs(self) -> Needs:
        """Queries of the probes and of the hops' seeds, which are chosen later."""
        return super().needs() | Needs(later_queries=self._propagates)

    @property
    def compares_layers(self) -> bool:
        """True with hops, which start from scores averaged over all layers."""
        return self._propagates

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """s-hat [G, N], the direct relevance in one layer, Eq. (V2)."""
        score = attention_sums(capture, self._probes(capture.spans, region), region, over="sum")
        return score / (score.sum(-1, keepdim=True) + self.epsilon)

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """R and S-hat.

        Raises `MissingCaptureError` without the seeds' queries, `PromptError` if the prompt has no
        question and `tail_probes` is 0.
        """
        scores = super().__call__(prefill, region).scores
        seed_scores = mean_seed_scores(scores, self.epsilon, prefill.shard)
        if self._propagates:
            propagated = self._propagated(prefill, region, seed_scores)
            if (mass := propagated.sum()) > 0:
                diffused = propagated / (mass + self.epsilon)
                scores = (1 - self.lambda_graph) * scores + self.lambda_graph * diffused
        return TokenScores(scores, seed_scores)

    @property
    def _propagates(self) -> bool:
        return self.hops > 0 and self.lambda_graph > 0

    def _propagated(self, prefill: Prefill, region: Region, seed_scores: Tensor) -> Tensor:
        """d [N], Eq. (V5) before normalisation."""
        layers = depth_layers(self.depths, prefill.layers)
        total, score = torch.zeros_like(seed_scores), seed_scores
        reached = torch.zeros(region.length, dtype=torch.bool, device=seed_scores.device)
        for hop in range(self.hops):
            seeds = select_seeds(score, self.seed_mass, self.max_seeds)
            if not len(seeds):
                break
            # All processes need the same positions.
            seeds = prefill.shard.from_first(seeds)
            reached[seeds] = True
            weights = score[seeds] / score[seeds].sum()
            positions = seeds.cpu() + region.start
            captures = map(prefill.with_queries(positions, layers).layer, layers)
            per_layer = [attention_sums(own, positions, region, weights) for own in captures]
            score = torch.stack([per_head.sum(0).to(score.device) for per_head in per_layer]).sum(0)
            score = prefill.shard.sum(score).masked_fill(reached, 0)  # only new tokens count
            total = total + self.decay**hop * score
        return total


def select_seeds(score: Tensor, mass: float, limit: int) -> Tensor:
    """Indices of the largest scores that together hold the share `mass`, ascending, int64.

    The shortest prefix of the descending order (ties: the earlier token) whose sum reaches `mass`
    of the total, cut at `limit`; tokens of score 0 are never seeds.

    Args:
        score: [N] non-negative.
        mass: share of the total, in (0, 1].
        limit: maximum number of seeds.

    Source: the paper, "Direct relevance".
    """
    # On the CPU, see `running_sums`.
    ordered = score.double().cpu().sort(descending=True, stable=True)
    reached = ordered.values.cumsum(0)
    # The total is the last of these sums: a sum in another order could differ in its last bit and
    # select tokens of score 0.
    seeds = ordered.indices[reached - ordered.values < mass * reached[-1]][:limit].sort().values
    return seeds.to(score.device)
