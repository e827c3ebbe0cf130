"""`BudgetPlan`, a budget in entries, and its division into whole entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from gracekv.errors import BudgetError


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """A budget in physical entries for one prompt.

    Attributes:
        layers: L.
        heads: G.
        context: N_ctx, tokens.
        total: B_total, entries that the context may hold in all heads together.
        recent: r, tokens of the recent window (their L*G*r entries are part of `total`).
        bytes: maximum bytes of the context's keys and values, if some are quantised and the budget
            is not a number of entries; `total` is then the most that could fit. Else None.
    """

    layers: int
    heads: int
    context: int
    total: int
    recent: int
    bytes: int | None = None

    @property
    def base(self) -> int:
        """B_base = B_total - L G r, the entries that floor and auction spend."""
        return self.total - self.layers * self.heads * self.recent

    @property
    def compressible(self) -> int:
        """N_c = N_ctx - r, tokens."""
        return self.context - self.recent

    @property
    def keeps_all(self) -> bool:
        """Whether nothing needs to be removed, so the result is FullKV."""
        return self.compressible <= 0 or self.total >= self.layers * self.heads * self.context

    def holds(self, entry_bytes: int) -> bool:
        """Whether all entries of `entry_bytes` fit, if the budget is in bytes."""
        full = self.layers * self.heads * self.context * entry_bytes
        return self.bytes is None or full <= self.bytes


def equal_shares(plan: BudgetPlan) -> Tensor:
    """int64 [L, G]: B_base in equal parts; the remainder goes to the first heads, one entry each.

    Heads are counted layer by layer. No share exceeds N_c: a budget that large keeps everything.
    """
    return equal_parts([plan.base], plan.layers * plan.heads).view(plan.layers, plan.heads)


def equal_parts(totals: Sequence[int], parts: int) -> Tensor:
    """int64 [n, parts]: n totals in equal parts; remainders go to the first parts, one each."""
    whole = torch.tensor(totals)[:, None]
    return whole // parts + (torch.arange(parts) < whole % parts)


def largest_remainder(ideal: Sequence[Fraction], total: int, cap: int) -> list[int]:
    """Integers near `ideal`, none above `cap`, that add up to `total` exactly.

    Each share is the integer part, at most `cap`; the remainder is added one by one in the order of
    the fractional parts, largest first, ties to the earlier, in repeated rounds over those below
    `cap`.

    Raises `BudgetError` if the integer parts exceed `total` or `total` exceeds the sum of the caps.
    """
    shares = [min(int(share), cap) for share in ideal]
    rest = total - sum(shares)
    if rest < 0 or total > cap * len(shares) or any(share < 0 for share in ideal):
        raise BudgetError(
            f"{total} entries cannot be divided: {len(shares)} shares of at most {cap} whose "
            f"integer parts add up to {sum(shares)}. Scale the shares (none may be negative) to "
            f"add up to the total."
        )
    order = sorted(range(len(shares)), key=lambda i: (int(ideal[i]) - ideal[i], i))
    while rest:
        for i in order:
            if rest and shares[i] < cap:
                shares[i] += 1
                rest -= 1
    return shares
