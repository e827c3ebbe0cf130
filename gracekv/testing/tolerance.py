"""Tolerances of attention outputs by dtype, and their reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds for one dtype of queries, keys and values.

    Attributes:
        output: relative Frobenius error of attention outputs against float64.
        lse: absolute error of the log-sum-exp against float64.
        reason: where the bounds come from.
    """

    output: float
    lse: float
    reason: str


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(
        2e-6, 1e-4, "float32 sums of a few thousand terms err by 6e-7; three times that"
    ),
    torch.float16: Tolerance(
        5e-4, 1e-4, "rounding the output alone costs 2.1e-4; statistics stay float32"
    ),
    torch.bfloat16: Tolerance(
        4e-3, 1e-4, "rounding the output alone costs 1.7e-3; statistics stay float32"
    ),
}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want||_F / ||want||_F in float64 for tensors [any shape]; 0 if both are 0."""
    got, want = got.double(), want.double()
    difference = float(torch.linalg.vector_norm(got - want))
    return difference / max(float(torch.linalg.vector_norm(want)), 1e-300) if difference else 0.0
