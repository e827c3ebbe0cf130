"""Several scores in one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Literal, final, get_args

import torch
from torch import Tensor

from gracekv.errors import ConfigError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.mean_attention import MeanAttention
from gracekv.value.read_ahead import ReadAhead
from gracekv.value.seed_scores import mean_seed_scores

Rule = Literal["sum", "rms", "geometric", "max"]


def _parts() -> tuple[Scorer, ...]:
    return ReadAhead(), MeanAttention()


@final
@SCORERS.register("mixture")
@dataclass(frozen=True, slots=False)
class Mixture(Scorer):
    """Sum, root of summed squares, geometric mean or maximum of other scores.

    Scores meet as they are: parts should be on one scale (attention shares are), except under
    "geometric", where a part's scale does not matter.

    Source: ours.

    Cost: that of its parts.

    Attributes:
        parts: the scores, at least one.
        weights: one a part, positive; empty for equal weights. They are normalised to sum 1, but
            under "max", where they are factors.
        rule: "sum" sum w x, "rms" sqrt(sum w x^2), "geometric" prod x^w, "max" max w x.

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    parts: tuple[Scorer, ...] = field(default_factory=_parts)
    weights: tuple[float, ...] = ()
    rule: Rule = "sum"

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ConfigError(
                f"Mixture.rule takes one of {', '.join(map(repr, get_args(Rule)))}; got "
                f"{self.rule!r}."
            )
        if not self.parts or (self.weights and len(self.weights) != len(self.parts)):
            raise ConfigError(
                f"Mixture takes at least one part, and a weight for each or none at all; got "
                f"{len(self.parts)} parts and weights {list(self.weights)!r}."
            )
        if not all(weight > 0 and math.isfinite(weight) for weight in self.weights):
            raise ConfigError(
                f"Mixture.weights takes positive numbers; got {list(self.weights)!r}. Leave out "
                f"the part that should not count."
            )

    def needs(self) -> Needs:
        """What all parts need."""
        return reduce(or_, (part.needs() for part in self.parts), Needs())

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """The mixed scores, float32 [L, G, N]."""
        scores = [part(prefill, region) for part in self.parts]
        weights = self.weights or (1.0,) * len(self.parts)
        tokens = mix([score.scores for score in scores], weights, self.rule)
        columns = next(
            (score.column_sums for score in scores if score.column_sums is not None), None
        )
        return TokenScores(tokens, mean_seed_scores(tokens), columns)


def mix(scores: list[Tensor], weights: tuple[float, ...], rule: Rule) -> Tensor:
    """float32 of the scores' shape [L, G, N]; arithmetic in float64, see `Mixture`."""
    stacked = torch.stack([score.double() for score in scores])
    share = torch.tensor(weights, dtype=torch.float64, device=stacked.device)[:, None, None, None]
    if rule == "max":
        return (share * stacked).amax(dim=0).float()
    share = share / share.sum()
    if rule == "sum":
        mixed = (share * stacked).sum(dim=0)
    elif rule == "rms":
        mixed = (share * stacked.square()).sum(dim=0).sqrt()
    else:
        # A token that one part gives nothing still ranks by the others.
        mixed = (share * stacked.clamp_min(1e-30).log()).sum(dim=0).exp()
    return mixed.float()
