"""The floor's purchases, compiled: paths bought whole or not at all, one after the other."""

from __future__ import annotations

from typing import Any

from numba import njit  # type: ignore[import-untyped,unused-ignore]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def buy_paths(
    last: Any, parent: Any, cost: Any, head: Any, budget: int, caps: Any, done: Any
) -> None:
    """Mark in `done` the operations of all paths that fit.

    Args:
        last: int64 [n], the lowest operation of each path, in order of purchase.
        parent: int64 [m], -1 for the topmost.
        cost: int64 [m].
        head: int64 [m].
        budget: most entries in all.
        caps: int64 [L * G], most entries of each head; changed.
        done: bool [m], False; changed.
    """
    for lowest in last:
        price, op = 0, lowest
        while op >= 0 and not done[op]:
            price += cost[op]
            op = parent[op]
        unit = head[lowest]
        if price > budget or price > caps[unit]:
            continue
        budget -= price
        caps[unit] -= price
        op = lowest
        while op >= 0 and not done[op]:
            done[op] = True
            op = parent[op]
