"""Attention from the prompt's end, spread to the tokens that follow the attended ones."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from gracekv.kernels.uploads import filled, stream_of, upload_all
from gracekv.prefill import LayerCapture, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, ProbeScorer, attention_sums, noted

# Tokens per block, summed by one matrix product.
_BLOCK = 256


@SCORERS.register("read_ahead", works_sharded=True)
class ReadAhead(ProbeScorer):
    """Attention from the prompt's end, spread to the tokens that follow the attended ones.

    The question's last tokens attend to where an answer begins. The answer's later tokens are
    attended to only after the ones before them have been generated, so no query of the prompt shows
    it. Hence a token's score is a weighted sum of the attention that it and the tokens before it
    receive; near ones weigh more.

    Source: ours; the attention is the paper's direct relevance (Eq. (V2)).

    Cost: attention rows of 48 probes in every layer: O(L H P T d), about 1 % of a prefill.

    Attributes:
        question_probes: last question positions whose attention counts (the paper's 32).
        tail_probes: last prompt positions whose attention counts (the paper's 16).
        lookahead: mean number of tokens that attention is spread over, at least 1. Ours: fewer miss
            the ends of long answers, more blur the score.
        power: exponent of the power mean over probes and query heads: 1 is the mean, 2 the root
            mean square, which favours single probes with much attention.
        max_weight: weight of the maximum over probes and query heads; the mean has the rest. With
            the maximum, one probe that attends to a token is enough.
    """

    removed_fields = (("kernel", "geometric"),)
    lookahead: int = bounded(25, at_least=1, hint="In tokens; 1 with power=1 is mean attention.")
    power: float = bounded(1.0, at_least=1)
    max_weight: float = bounded(0.0, at_least=0, at_most=1)

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Attention shares [G, N], not normalised; attention to the prefix is not spread.

        Raises `PromptError` if the prompt has no such probe.
        """
        asked = partial(self._attention, capture, region, memory)
        if self.max_weight == 0:
            score = asked("mean")
        elif self.max_weight == 1:
            score = asked("max")
        else:
            score = torch.lerp(asked("mean"), asked("max"), self.max_weight)
        spread = spread_ahead(score, self.lookahead)
        return spread if self.power == 1 else spread ** (1.0 / self.power)

    def _attention(
        self, capture: LayerCapture, region: Region, memory: Memory, over: Literal["mean", "max"]
    ) -> Tensor:
        """Mean or maximum [G, N] over probes and query heads, computed once for all scorers."""

        def reduced() -> Tensor:
            probes, maximum = self._probes(capture.spans, region), over == "max"
            each = 1.0 if maximum else 1.0 / len(probes)
            weights = filled(len(probes), each, torch.float32, capture.keys.device)
            return attention_sums(
                capture, probes, region, weights, power=self.power, maximum=maximum, over=over
            )

        asked = ("read_ahead", self.question_probes, self.tail_probes, self.power, over, region)
        return noted(memory, asked, capture, reduced)


def spread_ahead(score: Tensor, length: int) -> Tensor:
    """Weighted sum of the scores of each token and the tokens before it; the weights sum to 1.

    Args:
        score: [..., N], non-negative.
        length: mean number of tokens, at least 1: the i-th token before weighs
            (1 - 1/length)^i / length.

    Returns [..., N] in score's dtype; sums run in float64.
    """
    if length == 1:
        return score
    width = score.shape[-1]
    # Sum within blocks by a matrix product, then carry each block's sum to the next ones.
    blocks = -(-width // _BLOCK)
    inside, onwards, across = _decays(blocks, length, score.device, stream_of(score.device))
    padded = torch.nn.functional.pad(score, (0, blocks * _BLOCK - width)).double()
    sums = padded.unflatten(-1, (-1, _BLOCK)) @ inside
    spread = torch.empty_like(sums, dtype=score.dtype)
    torch.addcmul(sums, (sums[..., -1] @ across)[..., None], onwards, out=spread)
    return spread.flatten(-2)[..., :width]


@lru_cache(maxsize=4)
def _decays(blocks: int, length: int, device: torch.device, stream: int) -> list[Tensor]:
    """Weights between a block's tokens, of a block's carry, and between blocks; float64.

    Made on the CPU and uploaded together, since a dozen small operations would be slower on a GPU.
    """
    step = 1.0 - 1.0 / length
    inside, onwards = _decay(_BLOCK, step, 1.0 / length), _decay(_BLOCK, step, step)[:1]
    return upload_all([inside, onwards, _decay(blocks, step**_BLOCK, 1.0, first=1)], device)


def _decay(size: int, step: float, factor: float, *, first: int = 0) -> Tensor:
    """float64 [size, size]: factor step^(j - i - first) for j - i >= first, else 0."""
    place = torch.arange(size, dtype=torch.float64)
    exponent = place - place[:, None] - first
    return torch.where(exponent < 0, 0.0, factor * step ** exponent.clamp(min=0))
