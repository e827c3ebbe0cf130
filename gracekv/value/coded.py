"""`CodedRelevance`: the relevance of all tokens and heads, a byte each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Values below this share of the largest become 0. Source: ours.
_SMALLEST_SHARE = 1e-7


@dataclass(frozen=True, slots=True, eq=False)
class CodedRelevance:
    """Relevance in multiples of the head's mean, on a logarithmic scale; tensors on the CPU.

    Attributes:
        codes: uint8 [L, G, N]; 0 stands for 0 and for values below 1e-7 of the largest.
        low: logarithm of the value of code 1.
        high: logarithm of the value of code 255.
        mean: float32 [L, G], each head's mean.
    """

    codes: Tensor
    low: float
    high: float
    mean: Tensor

    @classmethod
    def of(cls, relevance: Tensor) -> CodedRelevance:
        """Encode relevance [L, G, N], which is not negative. Waits for a GPU twice.

        Logarithms are off by at most (high - low) / 508, so values by about 3 %.
        """
        scaled = relevance.to(torch.float64, copy=True)
        mean = scaled.mean(-1)
        scaled *= mean.reciprocal().nan_to_num_(posinf=0.0)[..., None]
        low, high, codes = 0.0, 0.0, torch.zeros_like(relevance, dtype=torch.uint8)
        if relevance.numel():
            largest = scaled.amax()
            large = scaled >= (largest * _SMALLEST_SHARE).clamp_min(1e-300)
            smallest = torch.where(large, scaled, torch.inf).amin()
            ends = torch.stack([smallest, largest]).log().tolist()
            if math.isfinite(ends[1]):
                low, high = ends
                steps = scaled.log_().sub_(low).div_((high - low) / 254 or 1.0).round_().add_(1)
                codes = torch.where(large, steps, 0).to(torch.uint8)
        return cls(codes.cpu(), low, high, mean.float().cpu())

    def decoded(self) -> Tensor:
        """float32 [L, G, N], in multiples of the head's mean."""
        return self._decode(self.codes)

    def at(self, token: int) -> Tensor:
        """float32 [L, G]: the relevance of one token, counted from the context's start."""
        return self._decode(self.codes[..., token]) * self.mean

    def _decode(self, codes: Tensor) -> Tensor:
        step = (self.high - self.low) / 254
        return torch.where(codes > 0, (self.low + step * (codes.float() - 1)).exp(), 0.0)
