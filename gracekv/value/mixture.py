"""A combination of several scores."""

from __future__ import annotations

import functools
from dataclasses import field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gracekv.errors import ConfigError
from gracekv.kernels.uploads import filled, on_device
from gracekv.prefill import LayerCapture, Region
from gracekv.value.base import SCORERS, Memory, Scorer, part_scores
from gracekv.value.mean_attention import MeanAttention
from gracekv.value.read_ahead import ReadAhead

Rule = Literal["sum", "rms", "geometric"]


@SCORERS.register("mixture", works_sharded=True)
class Mixture(Scorer):
    """Sum, root of summed squares or geometric mean of other scores.

    Scores are not normalised: they should have one scale, as attention shares do, except with
    "geometric", where scale does not matter.

    Source: ours.

    Cost: that of its scorers.

    Attributes:
        scorers: the scores that are combined, at least one.
        weights: one per scorer, positive; empty for equal weights. They are normalised to sum 1.
        rule: "sum" sum w x, "rms" sqrt(sum w x^2), "geometric" prod x^w.
    """

    scorers: tuple[Scorer, ...] = field(default_factory=lambda: (ReadAhead(), MeanAttention()))
    weights: tuple[float, ...] = ()
    rule: Rule = "sum"

    def check(self) -> None:
        """Raise `ConfigError` if weights and scorers do not match."""
        if not self.scorers or len(self.weights) not in (0, len(self.scorers)):
            raise ConfigError(
                f"Mixture takes at least one scorer, and one weight for each or none; got "
                f"{len(self.scorers)} scorers and weights {list(self.weights)!r}."
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise ConfigError(
                f"Mixture.weights takes positive numbers; got {list(self.weights)!r}. Remove "
                f"scorers that should not count."
            )

    @property
    def parts(self) -> tuple[Scorer, ...]:
        """The scorers that are combined."""
        return self.scorers

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """The combined scores [G, N]."""
        scores = [part_scores(part, capture, region, memory) for part in self.parts]
        return combine_scores(scores, self.weights or (1.0,) * len(scores), self.rule)


def combine_scores(scores: list[Tensor], weights: tuple[float, ...], rule: Rule) -> Tensor:
    """Combine scores [..., N] as `Mixture` does: float32, computed in float64."""
    stacked, part = torch.stack(scores), np.array(weights) / sum(weights)
    part = np.sqrt(part) if rule == "rms" else part
    share = on_device(torch.from_numpy(part), stacked.device).view(-1, *[1] * scores[0].ndim)
    if rule == "geometric":
        # The lower bound: a token with a score of 0 still ranks by its other scores.
        parts = stacked.maximum(filled(1, 1e-30, torch.float64, stacked.device)).pow_(share)
    else:
        parts = stacked * share
    joined: Any = {"sum": torch.add, "rms": torch.hypot, "geometric": torch.mul}[rule]
    *first, last = parts.unbind()
    if not first:
        return (last.abs() if rule == "rms" else last).float()
    # The last operation also rounds.
    rounded = torch.empty_like(last, dtype=torch.float32)
    joined(functools.reduce(joined, first), last, out=rounded)
    return rounded
