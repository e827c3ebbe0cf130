"""The largest selection that fits a budget in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from gracekv.allocate.budget import BudgetPlan
from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.allocate.selection import Selection
from gracekv.distributed.head_shard import HeadShard


class HasSelection(Protocol):
    """What an allocation gives."""

    @property
    def selection(self) -> Selection:
        """The entries that stay."""


Chosen = TypeVar("Chosen", bound=HasSelection)


def within_bytes(
    plan: BudgetPlan,
    costs: EntryBytes,
    choose: Callable[[BudgetPlan], Chosen],
    shard: HeadShard | None = None,
) -> tuple[BudgetPlan, Chosen]:
    """The most entries whose selection takes at most `plan.bytes`, and that selection.

    What a selection takes depends on how its entries lie: the last block of each head is as dear
    as a full one. So the number is searched for, between none and `plan.total`, by secants and
    halves in turn; one entry more would not fit. Where a larger budget keeps all that a smaller
    one keeps, as a top-k does, no number beyond it fits either.

    Source: ours.

    Args:
        plan: with `bytes`; its `total` is an upper bound.
        costs: bytes of the entries.
        choose: the selection for a plan of fewer entries.
        shard: which heads the selections are of; None: all.
    """
    if plan.bytes is None:
        raise AssertionError("The plan counts entries, not bytes.")
    limit, none = plan.bytes, plan.layers * plan.heads * plan.recent

    def attempt(total: int) -> tuple[int, Chosen]:
        found = choose(replace(plan, total=total))
        return limit - selection_bytes(found.selection, plan, costs, shard), found

    low, high = none, plan.total
    left, found = attempt(high)
    if left >= 0:
        return plan, found
    over, spare = -left, limit - none * costs.exact
    best: Chosen | None = None
    halve = False
    while high - low > 1:
        guess = low + max(1, (high - low) * spare // (spare + over))
        middle = (low + high) // 2 if halve else min(guess, high - 1)
        left, found = attempt(middle)
        if left >= 0:
            low, spare, best = middle, left, found
        else:
            high, over = middle, -left
        halve = not halve
    chosen = attempt(low)[1] if best is None else best
    return replace(plan, total=low), chosen


def selection_bytes(
    selection: Selection, plan: BudgetPlan, costs: EntryBytes, shard: HeadShard | None
) -> int:
    """Bytes of the context's entries: those of `selection`, and the recent window of `plan`.

    With `shard`, of the selections of all processes.
    """
    counts, exact = selection.offsets.diff(), 0
    if costs.sinks:
        stays = (selection.start < selection.region[0] + costs.sinks).cpu()
        own = torch.bincount(selection.head_of_entry()[stays], minlength=len(counts))
        counts, exact = counts - own, int(own.sum())
    size = costs.heads(exact, counts)
    if shard is not None:
        size = shard.total(size)
    return plan.layers * plan.heads * plan.recent * costs.exact + size
