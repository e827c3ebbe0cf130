"""`rate_distortion`: bits by rate and distortion, with the same bytes in every head (RDKV)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate import Selection
from gracekv.precision.base import PRECISIONS, AllocatingPrecision
from gracekv.precision.uniform import UniformPrecision
from gracekv.precision.width_auction import Entries, WidthCosts, widths_by_head
from gracekv.prefill import CaptureInfo
from gracekv.registry import bounded


@PRECISIONS.register("rate_distortion", works_sharded=True)
class RateDistortion(AllocatingPrecision):
    """Each entry is dropped or kept at 2, 4, 8 or all bits, at one price per bit and head (RDKV).

    An entry of score s takes the b bits that minimise s epsilon(b) + lambda b. Every KV head has
    the same bytes, and the lowest lambda at which its entries fit; if several entries change at one
    lambda, the earlier comes first. Scores are token scores times their head's sensitivity. With a
    budget in entries, all entries stay unquantised.

    Source: Zhang et al. (2026), RDKV, arXiv:2605.08317, and its public code. Ours: keys take the
    bits of their token's value, whereas the code distributes bits over the channels of keys; lambda
    decreases until the exact bytes are spent, including scales and zero points, whereas the code
    stops within 1 % of the mean bits.

    Cost: a sort of four times the candidates.

    Attributes:
        distortion: epsilon of 2, 4 and 8 bits, the share of a score that rounding loses; it is 1 at
            0 bits, 0 at 16 (the public code's table, means over keys and values of Llama-3.1-8B).
        group: how many numbers share a scale and a zero point: consecutive entries of one width in
            a head for keys, channels for values (ours, as in `uniform`; the code has one group for
            all entries, or channels, which rounds keys to 2 bits too coarsely).
    """

    distortion: tuple[float, float, float] = bounded((0.25, 0.011, 0.000057), above=0, below=1)
    group: int = bounded(32, at_least=1)

    @property
    def stored(self) -> tuple[UniformPrecision, ...]:
        return tuple(UniformPrecision(bits, self.group, sinks=0) for bits in (2, 4, 8))

    def allocate(
        self,
        info: CaptureInfo,
        measured: Sequence[Any],
        candidates: Selection,
        worth: Tensor,
        budget: int,
    ) -> Tensor:
        costs = WidthCosts.of(self.stored, info)
        head, heads = candidates.head_of_entry(), info.layers * info.kv_heads
        loss = torch.tensor([[*self.distortion, 0.0]] * heads, dtype=torch.float64)
        entries = Entries(worth.double().cpu(), head, loss, fixed=torch.zeros_like(head).bool())
        level = widths_by_head(entries, costs, budget // (heads * info.shard.ranks))
        return torch.tensor((0, *costs.bits), dtype=torch.uint8)[level]
