"""Whole shares of a budget: equal ones, and the largest-remainder rounding of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from gracekv.allocate.budget import BudgetPlan
from gracekv.errors import BudgetError


def equal_shares(plan: BudgetPlan) -> Tensor:
    """int64 [L, G]: B_base in equal parts; the remainder goes to the first heads, one entry each.

    Heads count layer by layer. No share exceeds N_c, since a budget that large keeps everything.
    """
    units = plan.layers * plan.heads
    share, left = divmod(plan.base, units)
    return (share + (torch.arange(units) < left).long()).view(plan.layers, plan.heads)


def largest_remainder(wanted: Sequence[Fraction], total: int, cap: int) -> list[int]:
    """Whole numbers near `wanted`, none above `cap`, that add up to `total` exactly.

    Each share is the whole part, at most `cap`; the remainder is added one by one in the order of
    the fractional parts, largest first, ties to the earlier, again and again among those below
    `cap`.

    Raises `BudgetError` if the whole parts exceed `total` or `total` exceeds what the caps allow.
    """
    shares = [min(int(share), cap) for share in wanted]
    left = total - sum(shares)
    if left < 0 or total > cap * len(shares) or any(share < 0 for share in wanted):
        raise BudgetError(
            f"{total} entries cannot be shared out: {len(shares)} shares of at most {cap} whose "
            f"whole parts add up to {sum(shares)}. Scale the shares (none may be negative) to "
            f"add up to the total."
        )
    order = sorted(range(len(shares)), key=lambda i: (int(wanted[i]) - wanted[i], i))
    while left:
        for i in order:
            if left and shares[i] < cap:
                shares[i] += 1
                left -= 1
    return shares
