"""Rank values and buy in order until a limit, in one process or over several.

Sorts and searches use the fastest library of the device: numpy is faster than torch on CPUs.

Over several processes a cut is found without moving the candidates. Each process sums the weights
of its candidates by 4 bits of their keys, the sums are all-reduced, and the 16 bins show which
value of these bits the cut has; then the next 4 bits, among the candidates that share those. So the
cut is exact after at most 16 rounds of 128 bytes for any number of candidates. If some candidates
free budget that others need, several cuts follow, each with the budget left by the last.

Source: ours (radix selection, all-reduced).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gracekv.distributed.sharding import HeadShard

_BITS = 4


def descending(values: Tensor) -> Tensor:
    """int64 [n]: indices that sort `values` in descending order; ties in no particular order."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.argsort(-values.numpy()))
    return torch.sort(values, descending=True).indices


def where_true(mask: Tensor) -> Tensor:
    """int64: ascending indices at which the bool [n] `mask` is true."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().flatten()


def dense_rank(values: Tensor, *, falling: bool = False) -> Tensor:
    """int64 [n]: number of distinct values below each (above each, if `falling`)."""
    order = descending(values if falling else -values)
    ordered = values.index_select(0, order)
    steps = torch.zeros_like(order)
    steps[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    return torch.empty_like(order).index_copy_(0, order, steps)


def weighted_cut(
    keys: Tensor, weights: Tensor, limit: int, shard: HeadShard
) -> tuple[int, int] | None:
    """The largest key t such that the candidates of key >= t together weigh more than `limit`.

    The candidates above t are those that fit if taken by descending key.

    Args:
        keys: int64 [n] of this process's candidates, at least 0.
        weights: int64 [n], at least 0.
        limit: at least 0.
        shard: reaches the other processes.

    Returns:
        t, and the weight of all candidates of larger keys in all processes; None if the total
        weight is at most `limit`.
    """
    length = int(shard.maximum(keys.max() if len(keys) else keys.new_zeros(()))).bit_length()
    prefix, above = 0, 0
    for shift in range((length - 1) // _BITS * _BITS, -1, -_BITS) if length else (0,):
        digit = (keys >> shift) & (2**_BITS - 1)
        bins = torch.zeros(2**_BITS, dtype=torch.int64, device=keys.device)
        bins = shard.sum(bins.index_add_(0, digit, weights)).cpu()
        # Sums at and above each digit, plus all above the prefix.
        reached = bins.flip(0).cumsum(0).flip(0) + above
        beyond = (reached > limit).nonzero()
        if not len(beyond):
            return None
        crossing = int(beyond[-1])
        above = int(reached[crossing] - bins[crossing])
        prefix |= crossing << shift
        same = digit == crossing
        keys, weights = keys[same], weights[same]
    return prefix, above


def first_fitting(
    keys: Tensor, ties: Tensor, weights: Tensor, limit: int, shard: HeadShard
) -> Tensor:
    """bool [n]: the candidates before the first that exceeds `limit`, over all processes.

    Candidates with equal key and tie are taken together or not at all.

    Args:
        keys: float64 [n] of this process's candidates, at least 0; the larger come first.
        ties: int64 [n], at least 0; of equal keys the smaller tie comes first.
        weights: int64 [n], at least 0.
        limit: at least 0.
        shard: reaches the other processes.
    """
    # Non-negative floats have the order of their bits, which are nearly their logs.
    bits = keys.contiguous().view(torch.int64)
    if (cut := weighted_cut(bits, weights, limit, shard)) is None:
        return torch.ones_like(bits, dtype=torch.bool)
    fits = bits > cut[0]
    tied = (bits == cut[0]).nonzero().flatten()
    order = shard.maximum(ties.max() if len(ties) else ties.new_zeros(())) - ties[tied]
    if (last := weighted_cut(order, weights[tied], limit - cut[1], shard)) is None:
        raise AssertionError("The tied candidates alone exceed what is left.")
    fits[tied[order > last[0]]] = True
    return fits


def affordable(
    keys: Tensor, ties: Tensor, costs: Tensor, limit: int, shard: HeadShard
) -> tuple[int, int]:
    """How many of this process's candidates come before the first at which the sum exceeds `limit`.

    All processes' candidates have one order, and each process's are already sorted. No two have the
    same key and tie.

    Args:
        keys: float64 [n], at least 0; the larger come first.
        ties: int64 [n], at least 0; of equal keys the smaller tie comes first.
        costs: int64 [n] of this process's candidates; negative costs free budget.
        limit: at least 0.
        shard: reaches the other processes.

    Returns:
        The number, and the part of `limit` left by the candidates before that one.
    """
    if shard.ranks == 1:
        fits = (costs.cumsum(0) > limit).cumsum(0) == 0
        count, spent = torch.stack([fits.sum(), (costs * fits).sum()]).tolist()
        return count, limit - spent
    begin = 0
    while True:
        # Sums without negative costs exceed the limit no later than sums with them.
        rest = costs[begin:]
        fits = first_fitting(keys[begin:], ties[begin:], rest.clamp(min=0), limit, shard)
        count = int(fits.sum())
        taken, spent = shard.sum(torch.tensor([count, int(rest[:count].sum())])).tolist()
        if not taken:
            return begin, limit
        begin, limit = begin + count, limit - int(spent)


Offer: TypeAlias = tuple[float, int, int]
"""Key, tie and price of a purchase: larger keys come first, then smaller ties."""


def buy_in_turn(
    first: Callable[[int], Offer | None], buy: Callable[[], None], room: int, shard: HeadShard
) -> None:
    """Buy the first offer of all processes that fits in `room` until no process has one.

    Args:
        first: returns this process's first purchase within the given budget, or None.
        buy: makes the purchase that `first` returned.
        room: budget of all processes.
        shard: reaches the other processes.
    """
    while (offer := first_offer(first(room), shard)) is not None:
        room -= offer[1]
        if offer[0] == shard.rank:
            buy()


def first_offer(offer: Offer | None, shard: HeadShard) -> tuple[int, int] | None:
    """The rank of the process with the first offer, and its price; None if no process has one.

    Args:
        offer: this process's key, tie and price, or None.
        shard: reaches the other processes.
    """
    if shard.ranks == 1:
        return None if offer is None else (0, offer[2])
    own = (-1.0, 0, 0) if offer is None else offer
    offers = shard.gather(torch.tensor(own, dtype=torch.float64)).tolist()
    first = min(range(shard.ranks), key=lambda rank: (-offers[rank][0], offers[rank][1]))
    return None if offers[first][0] < 0 else (first, int(offers[first][2]))
