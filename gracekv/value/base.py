"""`Relevance` and the interfaces that fill it: token scorers and head sensitivities."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor

from gracekv.errors import NonFiniteError, ShapeError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.registry import Registry, Strategy


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What a scorer says of every compressible token.

    Attributes:
        scores: R^tok [L, G, N] float32, non-negative (the paper's R sums to 1 per head).
        seed_scores: S-hat [N] float32, the head-averaged direct score that picks evidence probes.
        column_sums: [L, H, T] float32, all the attention that each prompt position received, per
            query head, for the stages that read it; None if the scorer did not compute it.

    Raises:
        ShapeError: scores and seed_scores do not fit one another.
        NonFiniteError: a score is NaN or infinite.
    """

    scores: Tensor
    seed_scores: Tensor
    column_sums: Tensor | None = None

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


@dataclass(frozen=True, slots=True, eq=False)
class Relevance:
    """Token worth and head sensitivity, the prices of the auction.

    Attributes:
        scores: R^tok [L, G, N] float32, Eq. (V6).
        seed_scores: S-hat [N] float32, Eq. (V3).
        sensitivity: omega [L, G] float32, mean 1, Eq. (V8).
    """

    scores: Tensor
    seed_scores: Tensor
    sensitivity: Tensor


class Scorer(Strategy, abc.ABC):
    """Score every compressible token of every (layer, KV head).

    Pure and deterministic; float32 or better whatever the model's dtype; scores are finite and
    non-negative. Result tensors lie on the device of layer 0.
    """

    @abc.abstractmethod
    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Scores [L, G, N] of the tokens of `region`."""

    def needs(self) -> Needs:
        """What the prefill must have captured beyond the direct probes' queries."""
        return Needs()


class Sensitivity(Strategy, abc.ABC):
    """How much each (layer, KV head) matters for the output: [L, G] float32 of mean 1."""

    @abc.abstractmethod
    def __call__(self, prefill: Prefill) -> Tensor:
        """omega [L, G] float32, positive, of mean 1."""

    def needs(self) -> Needs:
        """What the prefill must have captured."""
        return Needs()


SCORERS: Registry[Scorer] = Registry("value", "what each token is worth to the question")
Scorer.registry = SCORERS
SENSITIVITIES: Registry[Sensitivity] = Registry("sensitivity", "what each KV head is worth")
Sensitivity.registry = SENSITIVITIES
