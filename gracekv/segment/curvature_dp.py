"""The paper's segmenter: slots that end where the hidden-state trajectory turns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.errors import ConfigError, MissingCaptureError, NonFiniteError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.segment.base import SEGMENTERS, Partition, Segmenter
from gracekv.segment.curvature import Curvature
from gracekv.segment.dispersion import dispersion_table
from gracekv.segment.recurrence import best_partition
from gracekv.segment.robust import robust_z


@final
@SEGMENTERS.register("curvature_dp")
@dataclass(frozen=True, slots=False)
class CurvatureDP(Segmenter):
    """Slots of 16 to 128 tokens cut where hidden states turn, by dynamic programming.

    Maximises boundary scores minus cut costs, minus dispersion and length penalties of the slots
    (Eq. (S11)). A weight of 0 switches its term off.

    Source: Eqs. (S8) and (S11); departures 2. Ours:
    `curvature_weight` and how ties are broken.

    Cost: banded products of the sampled hidden states for N * `max_length` candidate slots, then N
    steps of one maximum each; about 1 % of a prefill. The surprisal that it reads costs the capture
    more, about a tenth of a prefill on a CPU.

    Attributes:
        min_length: n_min, tokens; only the last slot may be shorter, if nothing else reaches the
            end of the region (Eq. (S11)).
        max_length: n_max, tokens (Eq. (S11)).
        target_length: n_0, tokens, the length without penalty (Eq. (S11)).
        curvature_weight: weight of the normalised curvature in the boundary score (ours; 1 in
            Eq. (S8)).
        surprisal_weight: lambda_s (Eq. (S8)).
        dispersion_weight: lambda_d (Eq. (S11)).
        length_weight: lambda_n (Eq. (S11)).
        cut_cost: c_cut, paid for every slot but the first (Eq. (S11)).
        curvature: how kappa is computed. Its sampled layers and epsilon also serve dispersion
            and robust normalisation, as in the paper.

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    min_length: int = 16
    max_length: int = 128
    target_length: int = 64
    curvature_weight: float = 1.0
    surprisal_weight: float = 0.15
    dispersion_weight: float = 0.25
    length_weight: float = 0.10
    cut_cost: float = 1.0
    curvature: Curvature = field(default_factory=Curvature)

    def __post_init__(self) -> None:
        if not 1 <= self.min_length <= self.max_length or self.target_length < 1:
            raise ConfigError(
                f"CurvatureDP takes 1 <= min_length <= max_length and target_length >= 1, in "
                f"tokens; got min_length={self.min_length!r}, max_length={self.max_length!r}, "
                f"target_length={self.target_length!r}. The paper's are 16, 128 and 64."
            )
        for name in ("curvature", "surprisal", "dispersion", "length"):
            weight = getattr(self, f"{name}_weight")
            if not 0 <= weight < math.inf:
                raise ConfigError(
                    f"CurvatureDP.{name}_weight takes a finite number >= 0; got {weight!r}. Give 0 "
                    f"to switch the term off."
                )
        if not math.isfinite(self.cut_cost):
            raise ConfigError(
                f"CurvatureDP.cut_cost takes a finite number; got {self.cut_cost!r}. Give 0 to "
                f"make cuts free."
            )

    def needs(self) -> Needs:
        return self.curvature.needs() | Needs(surprisal=self.surprisal_weight > 0)

    def __call__(self, prefill: Prefill, region: Region) -> Partition:
        """The optimal partition, and kappa for the trees.

        Raises `MissingCaptureError` if hidden states or surprisal were not captured,
        `NonFiniteError` if they hold NaN or infinity, `ShapeError` if `region` is empty.
        """
        kappa = self.curvature(prefill)
        boundary = self.boundary_score(kappa, prefill.surprisal)
        profit = self.slot_profits(
            boundary[region.start : region.end],
            [
                hidden[region.start : region.end]
                for hidden in prefill.hidden_at(self.curvature.depths)
            ],
        )
        _, bounds = best_partition(profit.cpu().numpy(), self.min_length)
        return Partition(torch.from_numpy(bounds) + region.start, curvature=kappa)

    def boundary_score(self, kappa: Tensor, surprisal: Tensor | None) -> Tensor:
        """b of every position: float64 [T] from kappa [T] and surprisal [T].

        Raises `MissingCaptureError` if surprisal has weight but is None, `NonFiniteError` if it
        holds NaN or infinity. Source: Eq. (S8).
        """
        score = self.curvature_weight * robust_z(kappa, self.curvature.epsilon)
        if self.surprisal_weight > 0:
            if surprisal is None:
                raise MissingCaptureError(
                    f"Surprisal was not captured, and surprisal_weight is "
                    f"{self.surprisal_weight}. Capture for the pipeline that you run: "
                    f"gracekv.capture(model, prompt, needs=pipeline.needs()); or set "
                    f"surprisal_weight=0."
                )
            surprisal = surprisal.to(kappa.device)
            score = score + self.surprisal_weight * robust_z(surprisal, self.curvature.epsilon)
        if not bool(score.isfinite().all()):
            raise NonFiniteError(
                "The boundary score holds NaN or infinity because the captured surprisal does. "
                "Check the model's logits, or set surprisal_weight=0."
            )
        return score

    def slot_profits(self, boundary: Tensor, states: list[Tensor]) -> Tensor:
        """What each candidate slot adds to the objective: float64 [N, n_max].

        `boundary` [N] and the sampled layers' `states` [N, D] cover the compressible region. Entry
        (a, n-1) belongs to the n tokens from a on. Starting at a > 0 earns the score of the token
        before, as the cut lies after it. Source: Eqs. (S8), (S12).
        """
        lengths = torch.arange(1, self.max_length + 1, dtype=torch.float64, device=boundary.device)
        penalty = self.length_weight * ((lengths - self.target_length) / self.target_length) ** 2
        reward = functional.pad(boundary[:-1] - self.cut_cost, (1, 0))[: len(boundary)]
        profit = reward[:, None] - penalty
        if self.dispersion_weight > 0:
            dispersion = dispersion_table(states, self.max_length, self.curvature.epsilon)
            profit -= self.dispersion_weight * dispersion.to(profit.device)
        return profit
