"""`rate_distortion`: bits by rate and distortion, the same bytes in every head (RDKV)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gracekv.allocate import BudgetPlan, Selection
from gracekv.allocate.plan import EntryBytes
from gracekv.cache.coded import Coding
from gracekv.errors import ConfigError
from gracekv.precision.base import EXACT, PRECISIONS, Precision
from gracekv.precision.uniform import UniformPrecision
from gracekv.precision.width_auction import Entries, WidthCosts, widths_by_head
from gracekv.prefill import Prefill, PromptSpans, Region
from gracekv.registry import bounded

_WIDTHS: tuple[Literal[2, 4, 8], ...] = (2, 4, 8)


@PRECISIONS.register("rate_distortion", works_sharded=True)
class RateDistortion(Precision):
    """Each entry at 0 (dropped), 2, 4, 8 or all bits, by one price of a bit in each head (RDKV).

    An entry of score s takes the b bits that minimise s epsilon(b) + lambda b. Every KV head has
    the same bytes, and the least lambda at which its entries fit into them; where several change
    at one lambda, the earlier first. Scores are token scores times their head's sensitivity, keys
    are grouped by channel, values by token. A budget in entries leaves them all as they are.

    Source: Zhang et al. (2026), RDKV, arXiv:2605.08317, and its public code. Ours: keys take the
    bits of their token's value, where the code shares out bits among the channels of keys; lambda
    from above until the exact bytes are spent, scales and zero points included, where the code
    stops within 1 % of the mean bits.

    Cost: a sort of four times the candidates.

    Attributes:
        distortion: epsilon of 2, 4 and 8 bits, the share of a score that rounding loses; it is 1 at
            0 bits, 0 at 16 (the public code's table, means over keys and values of Llama-3.1-8B).
        group: numbers that share a scale and a zero point: consecutive entries of one width of a
            head for keys, channels for values (ours, as in `uniform`; the code has one group for
            all entries, or channels, which rounds keys to 2 bits too coarsely).
    """

    allocates: ClassVar[bool] = True
    distortion: tuple[float, ...] = bounded((0.25, 0.011, 0.000057), above=0, below=1)
    group: int = bounded(32, at_least=1)

    def check(self) -> None:
        if len(self.distortion) != 3 or list(self.distortion) != sorted(self.distortion)[::-1]:
            raise ConfigError(
                f"RateDistortion.distortion takes three falling shares, of 2, 4 and 8 bits; got "
                f"{self.distortion}."
            )

    @property
    def codings(self) -> tuple[Coding, ...]:
        return tuple(stored.codings[0] for stored in reversed(self._stored))

    @property
    def _stored(self) -> list[UniformPrecision]:
        return [UniformPrecision(bits, self.group, sinks=0) for bits in _WIDTHS]

    def entry_bytes(self, dim: int, itemsize: int, spans: PromptSpans) -> EntryBytes:
        """What entries cost at least, at 2 bits; raises `ShapeError` if the group does not fit."""
        return self._stored[0].entry_bytes(dim, itemsize, spans)

    def widths(self, start: Tensor, region: Region) -> Tensor:
        return torch.full_like(start, EXACT, dtype=torch.uint8)

    def allocate(
        self,
        prefill: Prefill,
        measured: Sequence[Any],
        candidates: Selection,
        worth: Tensor,
        plan: BudgetPlan,
    ) -> Tensor:
        if plan.bytes is None:
            return torch.full_like(candidates.start, EXACT, dtype=torch.uint8)
        costs = WidthCosts.of(self._stored, prefill)
        loss = torch.tensor([[*self.distortion, 0.0]], dtype=torch.float64)
        entries = Entries(
            worth=worth.double().cpu(),
            head=candidates.head_of_entry(),
            loss=loss.expand(prefill.layers * prefill.kv_heads, -1),
            fixed=torch.zeros(candidates.entries, dtype=torch.bool),
        )
        share = plan.bytes // (plan.layers * plan.heads) - plan.recent * costs.entry[-1]
        level = widths_by_head(entries, costs, share)
        return torch.tensor((0, *costs.bits), dtype=torch.uint8)[level]
