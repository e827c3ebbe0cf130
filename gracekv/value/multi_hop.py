"""The paper's value flow: what the question reads, and what those tokens read in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from einops import reduce
from torch import Tensor

from gracekv.errors import ConfigError, PromptError
from gracekv.prefill import Needs, Prefill, Region, depth_layers
from gracekv.value.attention import received
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.seed_scores import mean_seed_scores


@final
@SCORERS.register("multi_hop")
@dataclass(frozen=True, slots=False)
class MultiHop(Scorer):
    """Attention from the question, plus two hops along the attention of the tokens it reads.

    R = (1 - lambda) s-hat + lambda d-hat (Eq. (V6)). A head's R sums to 1, up to
    epsilon over the attention that it gives to the region. Where no hop finds a new token, R is
    s-hat alone (ours: the formula would scale every value by 1 - lambda for nothing).

    Source: Eqs. (V2) to (V6); departures 3. Ours: seeds
    of later hops, and R where no hop finds a new token.

    Cost: attention rows of at most 48 probes in every layer and of 64 seeds a hop in two layers:
    O(L H T d) with small constants, about 1 % of a prefill.

    Attributes:
        question: direct probes from the end of the question, "Direct relevance".
        tail: direct probes from the end of the prompt, "Direct relevance".
        hops: R_hop, Eq. (V5); 0 to 3, 0 scores by direct relevance alone.
        decay: rho, weight of a hop relative to the one before, Eq. (V5).
        lambda_graph: share of the hops in R, Eq. (V6).
        depths: relative depths of the layers that hops run through, "Preliminaries".
        seed_mass: eta_seed, share of the score that a hop's seeds hold together,
            "Direct relevance"; the same for later hops is ours.
        max_seeds: M_seed, most seeds of a hop, "Direct relevance"; for later hops ours.
        epsilon: guards denominators; the value is ours, small enough that a head's R sums to 1
            even if it gives the context a millionth of its attention.

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    question: int = 32
    tail: int = 16
    hops: int = 2
    decay: float = 0.5
    lambda_graph: float = 0.3
    depths: tuple[float, ...] = (0.5, 0.75)
    seed_mass: float = 0.9
    max_seeds: int = 64
    epsilon: float = 1e-12

    def __post_init__(self) -> None:
        if self.question < 0 or self.tail < 0 or self.question + self.tail < 1:
            raise ConfigError(
                f"MultiHop takes question >= 0 and tail >= 0 probes, at least one in all; got "
                f"question={self.question!r}, tail={self.tail!r}. The paper's are 32 and 16."
            )
        if self.hops not in range(4):
            raise ConfigError(
                f"MultiHop.hops takes 0, 1, 2 or 3; got {self.hops!r}. Give 0 for direct "
                f"relevance alone."
            )
        for name in ("decay", "lambda_graph"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ConfigError(f"MultiHop.{name} takes a number from 0 to 1; got {share!r}.")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ConfigError(
                f"MultiHop.depths takes at least one relative depth from 0 (first layer) to 1 "
                f"(last layer); got {self.depths!r}. Give hops=0 to do without hops."
            )
        if not 0 < self.seed_mass <= 1 or self.max_seeds < 1:
            raise ConfigError(
                f"MultiHop takes 0 < seed_mass <= 1 and max_seeds >= 1; got "
                f"seed_mass={self.seed_mass!r}, max_seeds={self.max_seeds!r}. Give hops=0 to do "
                f"without hops."
            )
        if not 0 < self.epsilon <= 1e-3:
            raise ConfigError(
                f"MultiHop.epsilon only keeps denominators from 0, so it lies in (0, 1e-3]; got "
                f"{self.epsilon!r}."
            )

    def needs(self) -> Needs:
        """Queries of the probes, and of the hops' seeds, which are known later."""
        return Needs(
            question_queries=self.question,
            tail_queries=self.tail,
            later_queries=self._propagates,
        )

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """R and S-hat.

        Raises `MissingCaptureError` without the seeds' queries, `PromptError` if the prompt has no
        question and `tail` is 0.
        """
        direct = self._direct(prefill, region)
        evidence = mean_seed_scores(direct, self.epsilon)
        if self._propagates:
            reached = self._propagated(prefill, region, evidence)
            mass = reached.sum()
            if mass > 0:
                diffused = reached / (mass + self.epsilon)
                mixed = (1 - self.lambda_graph) * direct + self.lambda_graph * diffused
                return TokenScores(mixed, evidence)
        return TokenScores(direct, evidence)

    @property
    def _propagates(self) -> bool:
        return self.hops > 0 and self.lambda_graph > 0

    def _direct(self, prefill: Prefill, region: Region) -> Tensor:
        """s-hat [L, G, N], Eq. (V2)."""
        probes = prefill.spans.direct_probes(self.question, self.tail)
        if not probes:
            raise PromptError(
                f"MultiHop has no probe: the prompt has no question and tail={self.tail}. Give "
                f"tail >= 1, or mark the question's span in the prompt."
            )
        prefill = prefill.with_queries(probes)
        device = prefill.keys[0].device
        scores = []
        for layer in range(prefill.layers):
            per_head = received(prefill, layer, probes, region)
            score = reduce(per_head, "(g n) t -> g t", "sum", g=prefill.kv_heads)
            scores.append((score / (score.sum(-1, keepdim=True) + self.epsilon)).to(device))
        return torch.stack(scores)

    def _propagated(self, prefill: Prefill, region: Region, evidence: Tensor) -> Tensor:
        """d [N], Eq. (V5) before normalisation."""
        layers = depth_layers(self.depths, prefill.layers)
        total, score = torch.zeros_like(evidence), evidence
        known = torch.zeros(region.length, dtype=torch.bool, device=evidence.device)
        for hop in range(self.hops):
            seeds = select_seeds(score, self.seed_mass, self.max_seeds)
            if not len(seeds):
                break
            known[seeds] = True
            weights = score[seeds] / score[seeds].sum()
            positions = seeds.cpu() + region.start
            view = prefill.with_queries(positions, layers)
            found = [received(view, layer, positions, region, weights) for layer in layers]
            score = torch.stack([per_head.sum(0).to(evidence.device) for per_head in found]).sum(0)
            score = score.masked_fill(known, 0)  # a hop only discovers
            total = total + self.decay**hop * score
        return total


def select_seeds(score: Tensor, mass: float, limit: int) -> Tensor:
    """Indices of the largest scores that together hold the share `mass`, ascending, int64.

    The shortest prefix of the descending order (ties: the earlier token) whose sum reaches `mass`
    of the total, cut at `limit`; tokens of score 0 are never seeds.

    Args:
        score: [N] non-negative.
        mass: share of the total, in (0, 1].
        limit: most seeds.

    Source: the paper, "Direct relevance".
    """
    ordered = score.double().sort(descending=True, stable=True)
    reached = ordered.values.cumsum(0)
    # The total is the last of these sums: one added up in another order could differ in its last
    # bit and let tokens of score 0 in.
    wanted = reached - ordered.values < mass * reached[-1]
    return ordered.indices[wanted][:limit].sort().values
