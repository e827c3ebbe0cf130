"""`Relevance` and the interfaces that fill it: token scorers and head sensitivities."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gracekv.distributed.head_shard import HeadShard
from gracekv.errors import NonFiniteError, ShapeError
from gracekv.prefill import Prefill, PrefillReader, Region
from gracekv.registry import Registry, Strategy


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """The score of every compressible token of every (layer, KV head).

    Attributes:
        scores: R^tok [L, G, N] float32, non-negative (the paper's R sums to 1 per head).
        seed_scores: S-hat [N] float32, one score per token for all heads; picks hop seeds and the
            evidence probes of the distortion.
        column_sums: [L, H, T] float32, sum over all prompt queries of the attention that each
            position receives, per query head, for later stages; None if not computed.

    Raises:
        ShapeError: scores and seed_scores have shapes that do not fit one another.
        NonFiniteError: a score is NaN or infinite.
    """

    scores: Tensor
    seed_scores: Tensor
    column_sums: Tensor | None = None

    @classmethod
    def from_scores(
        cls, scores: Tensor, column_sums: Tensor | None = None, shard: HeadShard | None = None
    ) -> Self:
        """Scores [L, G, N] with their mean over heads as seed scores, see `mean_seed_scores`."""
        return cls(scores, mean_seed_scores(scores, shard=shard), column_sums)

    def __post_init__(self) -> None:
        if self.scores.ndim != 3 or self.seed_scores.shape != self.scores.shape[-1:]:
            raise ShapeError(
                f"TokenScores takes scores [L, G, N] and seed_scores [N]; got "
                f"{list(self.scores.shape)} and {list(self.seed_scores.shape)}."
            )
        if not bool(self.scores.isfinite().all()):
            raise NonFiniteError(
                "Token scores hold NaN or infinity: the scorer divided by zero or the captured "
                "queries are broken."
            )


def mean_seed_scores(
    scores: Tensor, epsilon: float = 1e-12, shard: HeadShard | None = None
) -> Tensor:
    """S-hat [N]: scores [L, G, N] averaged over all heads and normalised to sum 1.

    `epsilon` keeps the denominator from 0; a score that is 0 everywhere stays 0. With `shard` the
    heads of all processes count.

    Source: Eq. (V3), whose scores are the direct relevance; the same rule for other scores is ours.
    """
    mean = scores.mean(dim=(0, 1))
    if shard is not None:
        mean = shard.sum(mean) / shard.ranks
    return mean / (mean.sum() + epsilon)


def rank_scores(order: Tensor) -> Tensor:
    """An order of tokens as scores: N, N - 1, ..., 1 over their sum; float32, shaped as `order`.

    Args:
        order: int64 [..., N], token indices from first to last.

    Source: ours.
    """
    length = order.shape[-1]
    ranks = torch.arange(length, 0, -1, dtype=torch.float64, device=order.device)
    ranks = (ranks / ranks.sum()).float().expand_as(order)
    return torch.zeros_like(ranks).scatter_(-1, order, ranks)


@dataclass(frozen=True, slots=True, eq=False)
class Relevance:
    """Token scores and head sensitivity, which the allocation multiplies.

    Attributes:
        scores: R^tok [L, G, N] float32, Eq. (V6).
        seed_scores: S-hat [N] float32, Eq. (V3).
        sensitivity: omega [L, G] float32, mean 1, Eq. (V8).
    """

    scores: Tensor
    seed_scores: Tensor
    sensitivity: Tensor


class Scorer(PrefillReader, Strategy, abc.ABC):
    """Score every compressible token of every (layer, KV head).

    Deterministic, without side effects; float32 or better whatever the model's dtype; scores are
    finite and non-negative. Result tensors lie on the device of layer 0.
    """

    @abc.abstractmethod
    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Scores [L, G, N] of the tokens of `region`."""


class Sensitivity(PrefillReader, Strategy, abc.ABC):
    """How much each (layer, KV head) matters for the output: [L, G] float32 of mean 1."""

    @abc.abstractmethod
    def __call__(self, prefill: Prefill) -> Tensor:
        """omega [L, G] float32, positive, of mean 1."""


SCORERS: Registry[Scorer] = Registry("value", "how much each token matters to the question")
Scorer.registry = SCORERS
SENSITIVITIES: Registry[Sensitivity] = Registry("sensitivity", "how much each KV head matters")
Sensitivity.registry = SENSITIVITIES
