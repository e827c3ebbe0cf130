"""Attention from the prompt's end, handed on to the tokens that come after those it meets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from einops import reduce
from torch import Tensor
from torch.nn import functional

from gracekv.errors import ConfigError, PromptError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.value.attention import probabilities
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.seed_scores import mean_seed_scores

Kernel = Literal["geometric", "flat"]


@final
@SCORERS.register("read_ahead")
@dataclass(frozen=True, slots=False)
class ReadAhead(Scorer):
    """What the prompt's end attends to, and the tokens that follow each place.

    The question's last tokens look at where an answer begins; its later tokens are read only once
    the ones before them have been generated, which no query of the prompt can show. So a token is
    worth what it and the tokens before it receive, the nearer the more.

    Source: ours; the score under it is the paper's direct relevance (Eq. (V2)).

    Cost: attention rows of 48 probes in every layer: O(L H P T d), about 1 % of a prefill.

    Attributes:
        question: probes from the end of the question (the paper's 32).
        tail: probes from the end of the prompt (the paper's 16).
        length: mean reach in tokens (25: at each token the reading goes on with probability 0.96);
            1 does not read ahead. Ours: shorter ones lose the ends of long answers, longer ones
            spread thin.
        kernel: "geometric", or "flat", in which `length` tokens share alike.
        power: 1 is the mean over probes and query heads, 2 the root of the mean square, which a
            single probe's interest survives.
        most: share of the maximum over probes and query heads beside their mean, from 0 to 1. One
            probe that points at a place is enough for it: of several places that hold a part of the
            answer, each may have one of its own.

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    question: int = 32
    tail: int = 16
    length: int = 25
    kernel: Kernel = "geometric"
    power: float = 1.0
    most: float = 0.0

    def __post_init__(self) -> None:
        if self.question < 0 or self.tail < 0 or self.question + self.tail < 1:
            raise ConfigError(
                f"ReadAhead takes question >= 0 and tail >= 0 probes, at least one in all; got "
                f"question={self.question!r}, tail={self.tail!r}."
            )
        if self.length < 1 or self.power < 1:
            raise ConfigError(
                f"ReadAhead takes length >= 1 tokens and power >= 1; got length={self.length!r}, "
                f"power={self.power!r}. length=1 with power=1 is the mean attention itself."
            )
        if self.kernel not in get_args(Kernel) or not 0 <= self.most <= 1:
            raise ConfigError(
                f"ReadAhead takes the kernel 'geometric' or 'flat' and a share most from 0 to 1; "
                f"got kernel={self.kernel!r}, most={self.most!r}."
            )

    def needs(self) -> Needs:
        """Queries of the probes."""
        return Needs(question_queries=self.question, tail_queries=self.tail)

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Attention shares, float32 [L, G, N], not normalised: heads compete by what they look at.

        What the prefix receives does not flow into the region. Raises `PromptError` if the prompt
        has no such probe.
        """
        probes = prefill.spans.direct_probes(self.question, self.tail)
        if not probes:
            raise PromptError(
                f"The prompt has no position among its last {self.question} question and "
                f"{self.tail} tail positions. Give tail >= 1."
            )
        prefill = prefill.with_queries(probes)
        device = prefill.keys[0].device
        tokens = torch.stack(
            [
                self._layer(prefill, layer, probes, region).to(device)
                for layer in range(prefill.layers)
            ]
        )
        return TokenScores(tokens, mean_seed_scores(tokens))

    def _layer(self, prefill: Prefill, layer: int, probes: list[int], region: Region) -> Tensor:
        """[G, N]."""
        chances = probabilities(prefill, layer, probes)[..., region.start : region.end]
        powers, heads = chances**self.power, prefill.kv_heads
        paid = reduce(powers, "(g n) p t -> g t", "mean", g=heads)
        if self.most > 0:
            paid.lerp_(reduce(powers, "(g n) p t -> g t", "max", g=heads), self.most)
        # A probe inside the region sees less than all of it.
        seen = paid.new_zeros(prefill.kv_heads, region.length)
        seen[:, : paid.shape[-1]] = paid
        return read_ahead(seen, self.length, self.kernel) ** (1.0 / self.power)


def read_ahead(score: Tensor, length: int, kernel: Kernel) -> Tensor:
    """What each token and its predecessors were given, weighed by a kernel of sum 1.

    Args:
        score: [..., N], non-negative.
        length: tokens, at least 1.
        kernel: "flat" weighs `length` tokens alike, "geometric" the i-th before by
            (1 - 1/length)^i / length, without an end.

    Returns [..., N] in score's dtype; sums run in float64.
    """
    if length == 1:
        return score
    width, sums = score.shape[-1], score.double() / length
    if kernel == "flat":
        sums = functional.pad(sums.cumsum(-1), (1, 0))
        stop = torch.arange(1, width + 1, device=score.device)
        # Differences of running sums leave noise where nothing was given.
        window = sums[..., stop] - sums[..., (stop - length).clamp(min=0)]
        return window.clamp(min=0).to(score.dtype)
    # What the last `reach` tokens give, then twice as many, until the rest cannot be seen.
    reach, left = 1, 1.0 - 1.0 / length
    while reach < width and left > 1e-12:
        sums = sums + left * functional.pad(sums[..., :-reach], (reach, 0))
        reach, left = 2 * reach, left * left
    return sums.to(score.dtype)
