"""The floor's purchases: paths bought whole or not at all, by one process or by several."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gracekv.allocate.ranking import first_fitting, first_offer
from gracekv.distributed.head_shard import HeadShard


class Paths:
    """Operations of this process's trees, bought path by path from an operation up to its root.

    Args:
        parent: of each operation, -1 for the topmost.
        cost: entries of each.
        head: layer * G + head of each.
    """

    def __init__(self, parent: list[int], cost: list[int], head: list[int]) -> None:
        self._parent, self._cost, self._head = parent, cost, head

    def bought(
        self,
        last: list[int],
        score: Tensor,
        ties: Tensor,
        budget: int,
        caps: list[int],
        shard: HeadShard,
    ) -> list[bool]:
        """Which operations are bought when each path of all processes is bought whole or not.

        As `gracekv.allocate.paths_numba.buy_paths`, path by path in one order over all processes.
        While the budget suffices each process decides alone; where that ends is found by one cut.
        After it they go on together, one purchase a round.

        Args:
            last: the lowest operation of each of n paths of this process, in order.
            score: float64 [n], at least 0; paths are bought by falling score.
            ties: int64 [n], their order among equal scores, in all processes.
            budget: most entries in all processes.
            caps: most entries of each head of this process.
            shard: reaches the other processes.
        """
        done, prices = self.alone(last, caps)
        price = torch.tensor(prices, dtype=torch.int64)
        if shard.total(int(price.sum())) <= budget:
            return done
        fits = first_fitting(score.cpu(), ties.cpu(), price, budget, shard)
        at, caps = int(fits.sum()), list(caps)
        done, prices = self.alone(last[:at], caps)
        for lowest, paid in zip(last, prices, strict=False):
            caps[self._head[lowest]] -= paid
        left = budget - shard.total(sum(prices))
        while left > 0:
            while at < len(last) and not self._fits(last[at], done, left, caps):
                at += 1
            offer = None
            if at < len(last):
                offer = (float(score[at]), int(ties[at]), self._price(last[at], done))
            first = first_offer(offer, shard)
            if first is None:
                break
            left -= first[1]
            if first[0] == shard.rank:
                caps[self._head[last[at]]] -= first[1]
                self._buy(last[at], done)
                at += 1
        return done

    def alone(
        self, last: list[int], caps: list[int], budget: float = math.inf
    ) -> tuple[list[bool], list[int]]:
        """What one process buys, and what each path then costs; 0: not bought."""
        done, left, prices = [False] * len(self._parent), list(caps), []
        for lowest in last:
            price = self._price(lowest, done)
            if price > min(budget, left[self._head[lowest]]):
                price = 0
            else:
                budget -= price
                left[self._head[lowest]] -= price
                self._buy(lowest, done)
            prices.append(price)
        return done, prices

    def _fits(self, lowest: int, done: list[bool], left: int, caps: list[int]) -> bool:
        return 0 < self._price(lowest, done) <= min(left, caps[self._head[lowest]])

    def _price(self, lowest: int, done: list[bool]) -> int:
        price, op = 0, lowest
        while op >= 0 and not done[op]:
            price += self._cost[op]
            op = self._parent[op]
        return price

    def _buy(self, lowest: int, done: list[bool]) -> None:
        op = lowest
        while op >= 0 and not done[op]:
            done[op] = True
            op = self._parent[op]
