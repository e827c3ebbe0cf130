"""`CodedRelevance`: the relevance of all tokens and heads, a byte each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# What is below this share of the largest becomes 0. Source: ours.
_SMALLEST_SHARE = 1e-7


@dataclass(frozen=True, slots=True, eq=False)
class CodedRelevance:
    """Relevance in multiples of the head's mean, on a logarithmic scale; tensors on the CPU.

    Attributes:
        codes: uint8 [L, G, N]; 0 stands for 0, and for what is below 1e-7 of the largest.
        low: logarithm of what code 1 stands for.
        high: of what code 255 stands for.
        mean: float32 [L, G], each head's mean.
    """

    codes: Tensor
    low: float
    high: float
    mean: Tensor

    @classmethod
    def of(cls, relevance: Tensor) -> CodedRelevance:
        """The codes of relevance [L, G, N], which is at least 0; off by (high - low) / 508 at most.

        The error is that of the logarithm: about 3 %. Layer by layer, so that little is held.
        """
        mean = torch.stack([layer.double().mean(-1) for layer in relevance])
        scale = torch.where(mean > 0, 1.0 / mean, 0.0)
        largest = float((relevance.amax(-1).double() * scale).max()) if relevance.numel() else 0.0
        if largest <= 0:
            return cls(
                torch.zeros(relevance.shape, dtype=torch.uint8), 0.0, 0.0, mean.float().cpu()
            )
        least = largest * _SMALLEST_SHARE

        def scaled(layer: int) -> Tensor:
            return relevance[layer].double() * scale[layer, :, None]

        smallest = (scaled(k) for k in range(len(relevance)))
        low = math.log(min(float(x.masked_fill_(x < least, torch.inf).min()) for x in smallest))
        high = math.log(largest)
        step = (high - low) / 254 or 1.0

        def coded(values: Tensor) -> Tensor:
            codes = ((values.clamp(min=math.exp(low)).log() - low) / step).round() + 1
            return torch.where(values >= least, codes, 0).to(torch.uint8)

        codes = torch.empty(relevance.shape, dtype=torch.uint8)
        for layer in range(len(relevance)):
            codes[layer] = coded(scaled(layer))
        return cls(codes, low, high, mean.float().cpu())

    def decoded(self) -> Tensor:
        """float32 [L, G, N], in multiples of the head's mean."""
        return self._decode(self.codes)

    def at(self, token: int) -> Tensor:
        """float32 [L, G]: the relevance of one token, counted from the context's start."""
        return self._decode(self.codes[..., token]) * self.mean

    def _decode(self, codes: Tensor) -> Tensor:
        step = (self.high - self.low) / 254
        return torch.where(codes > 0, (self.low + step * (codes.float() - 1)).exp(), 0.0)
