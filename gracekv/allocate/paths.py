"""The floor's purchases: paths bought one after the other, completely or not at all."""

from __future__ import annotations

from typing import Any

from torch import Tensor, int64, tensor

from gracekv.allocate.ranking import buy_in_turn, first_fitting
from gracekv.distributed.sharding import HeadShard


def buy_paths(
    last: Any, parent: Any, cost: Any, head: Any, budget: int, caps: Any, done: Any, prices: Any
) -> None:
    """Mark the operations of all paths that fit; takes lists, or arrays if compiled.

    Args:
        last: int [n], the lowest operation of each path, in order of purchase.
        parent: int [m], -1 for the topmost.
        cost: int [m].
        head: int [m].
        budget: maximum number of entries in total.
        caps: int [L * G], maximum entries of each head; reduced in place.
        done: bool [m]; set to True for operations that are bought.
        prices: int [n] zeros; set to the price of each path that is bought.
    """
    for path in range(len(last)):
        price, op = 0, last[path]
        while op >= 0 and not done[op]:
            price += cost[op]
            op = parent[op]
        unit = head[last[path]]
        if price > budget or price > caps[unit]:
            continue
        budget -= price
        caps[unit] -= price
        prices[path] = price
        op = last[path]
        while op >= 0 and not done[op]:
            done[op] = True
            op = parent[op]


def buy_together(
    last: list[int], parent: list[int], cost: list[int], head: list[int], *, score: Tensor,
    ties: Tensor, budget: int, caps: list[int], shard: HeadShard
) -> list[bool]:  # fmt: skip
    """Which operations are bought if the paths of all processes compete for one budget.

    Buys like `buy_paths`, in one order over all processes; the arguments are those of this one. A
    single process walks once. Several first decide separately; one cut finds where the budget ends,
    and from there they continue together, one purchase per round.

    Args:
        last: the lowest operation of each of n paths.
        parent: the parent of each operation, -1 for the topmost.
        cost: entries that each operation adds.
        head: the head of each operation.
        score: float64 [n], at least 0; paths are bought by descending score.
        ties: int64 [n], their order among equal scores over all processes.
        budget: maximum number of entries over all processes.
        caps: maximum entries of each head of this process.
        shard: reaches the other processes.
    """
    limit = budget if shard.ranks == 1 else sum(cost)

    def bought(paths: list[int], room: list[int]) -> tuple[list[bool], list[int]]:
        done, prices = [False] * len(parent), [0] * len(paths)
        buy_paths(paths, parent, cost, head, limit, room, done, prices)
        return done, prices

    done, prices = bought(last, list(caps))
    if shard.total(sum(prices)) <= budget:
        return done
    # A process without candidates still needs prices of this dtype.
    paid = tensor(prices, dtype=int64)
    at = int(first_fitting(score.cpu(), ties.cpu(), paid, budget, shard).sum())
    room = list(caps)
    done, prices = bought(last[:at], room)

    def first(most: int) -> tuple[float, int, int] | None:
        nonlocal at
        while at < len(last):
            price, op = 0, last[at]
            while op >= 0 and not done[op]:
                price += cost[op]
                op = parent[op]
            if 0 < price <= min(most, room[head[last[at]]]):
                return float(score[at]), int(ties[at]), price
            at += 1
        return None

    def buy() -> None:
        buy_paths([last[at]], parent, cost, head, limit, room, done, [0])

    buy_in_turn(first, buy, budget - shard.total(sum(prices)), shard)
    return done
