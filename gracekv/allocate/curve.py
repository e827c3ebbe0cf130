"""`AuctionCurve`: utility against entries spent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.allocate.base import Frontier
from gracekv.allocate.operations import Operations
from gracekv.allocate.selection import Selection
from gracekv.allocate.top_tokens import entry_gains

# Points of the drawn curve. Source: ours.
_POINTS = 240


@dataclass(frozen=True, slots=True, eq=False)
class AuctionCurve:
    """Utility against entries: first the floor, then the auction's operations, best utility first.

    Attributes:
        entries: int64 [P] ascending from 0, entries spent so far (recent window not counted).
        utility: float64 [P], sum of gains so far; the last is `accounting.utility`.
        floor_entries: entries that the floor spent.
        bound: the certified upper bound for any allocation of the budget over the same trees, or
            None.
    """

    entries: Tensor
    utility: Tensor
    floor_entries: int
    bound: float | None


def auction_curve(
    selection: Selection,
    scores: Tensor,
    sensitivity: Tensor,
    floor: Frontier | None,
    frontier: Frontier | None,
) -> AuctionCurve:
    """The curve of a run that ended with `frontier`, or with single tokens; subsampled evenly.

    `scores` [L, G, N] and `sensitivity` [L, G] are those of the run's `Relevance`.

    Operations are in the order of the greedy auction (least unit utility on the path, descending),
    whichever allocator chose them. Floats are summed on the CPU, see `running_sums`.
    """
    floor_entries = 0
    if frontier is None:
        gains = entry_gains(scores, sensitivity, selection)
        gained = gains.sort(descending=True).values.cpu().cumsum(0)
        spent = torch.arange(1, len(gained) + 1, device="cpu")
    else:
        ops = Operations.of(frontier.forest)
        executed = ops.executed(frontier)
        before = torch.zeros_like(executed) if floor is None else ops.executed(floor)
        bought = torch.nonzero(executed).flatten()
        # Operations that the floor executed have the key +inf and come first.
        order = bought[ops.path_minimum(before)[bought].sort(descending=True, stable=True).indices]
        spent = ops.cost[order].cumsum(0).cpu()
        gained = ops.gain[order].cpu().cumsum(0)
        floor_entries = int(torch.where(before, ops.cost, 0).sum())
    # About `_POINTS` evenly spaced points, plus the floor's end and the last one.
    at = torch.arange(len(spent), device="cpu")
    if len(spent) > _POINTS:
        marks = torch.linspace(0, int(spent[-1]), _POINTS, dtype=torch.float32, device="cpu").long()
        marks = torch.cat([marks, spent.new_tensor([floor_entries, int(spent[-1])])]).sort().values
        at = torch.searchsorted(spent, marks).clamp(max=len(spent) - 1).unique()
    entries, utility = (torch.nn.functional.pad(x[at], (1, 0)) for x in (spent, gained))
    bound = None if frontier is None else frontier.bound
    return AuctionCurve(entries, utility, floor_entries, bound)
