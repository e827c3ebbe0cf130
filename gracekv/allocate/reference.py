"""Floor, quotas and allocators directly from the equations: loops, float64, exact fractions.

`greedy_heap` is the reference of `greedy`; `integer_program` is that of `exact_dp`, with another
algorithm. Both are for tests and benchmarks: they return the same results as the strategies, more
slowly.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from fractions import Fraction
from itertools import accumulate, product

import numpy as np
import torch
from torch import Tensor

from gracekv.allocate.adaptive_heads import AdaptiveHeads
from gracekv.allocate.base import Frontier
from gracekv.allocate.operations import auction_start
from gracekv.allocate.plan import BudgetPlan
from gracekv.allocate.singleton import Singleton
from gracekv.errors import GracekvError
from gracekv.tree.base import Forest


def greedy_heap(start: Frontier, quota: Tensor | None, *, elastic: bool = False) -> Frontier:
    """The result of `Greedy` by the paper's priority queue, one operation at a time.

    Pops the available operation of the highest unit utility; ties go to the earlier layer, head,
    slot and start. One that does not fit the budget or its head's quota is discarded with its
    descendants; the search continues with the rest. `quota` is int64 [L, G], or None.

    Source: Eqs. (A5), (A6) and (A7) and the appendix on the greedy allocator; departures 6.
    """
    ops, executed, room = auction_start(start, quota)
    total = room.total
    per_head = None if room.per_head is None else room.per_head.tolist()
    done = executed.tolist()
    unit, cost, parent = ops.unit.tolist(), ops.cost.tolist(), ops.parent.tolist()
    tree, head = ops.tree.tolist(), ops.head().tolist()
    first_token = start.forest.start[ops.node].tolist()
    children: list[list[int]] = [[] for _ in unit]
    for op, above in enumerate(parent):
        if above >= 0:
            children[above].append(op)

    # Available nodes of one tree do not overlap, so tree and start break every tie.
    queue = [
        (-unit[op], tree[op], first_token[op], op)
        for op in range(len(ops))
        if not done[op] and (parent[op] < 0 or done[parent[op]])
    ]
    heapq.heapify(queue)
    while queue and total > 0:
        negative, _, _, op = heapq.heappop(queue)
        if elastic and negative >= 0:
            break
        if cost[op] > total or (per_head is not None and cost[op] > per_head[head[op]]):
            continue
        done[op] = True
        total -= cost[op]
        if per_head is not None:
            per_head[head[op]] -= cost[op]
        for child in children[op]:
            heapq.heappush(queue, (-unit[child], tree[child], first_token[child], child))
    return ops.frontier(start, torch.tensor(done, dtype=torch.bool, device=ops.cost.device))


def integer_program(start: Frontier, quota: Tensor | None, *, elastic: bool = False) -> Frontier:
    """An optimum of Eq. (A8) from scipy's integer solver, with one 0/1 variable per operation.

    The constraints are x_a <= x_parent(a), the budget, and the quotas (int64 [L, G], or None).
    Exponential at worst. Needs scipy (gracekv[cli]). Raises `GracekvError` if the solver gives up.
    """
    # Importing scipy's solvers changes the warning filters, so they are imported where used.
    from scipy.optimize import Bounds, LinearConstraint, milp

    ops, executed, room = auction_start(start, quota)
    offers = ops.offered(executed, elastic=elastic)
    gain, cost = ops.gain.numpy(), ops.cost.numpy().astype(float)
    count, largest = len(ops), gain.max(initial=0.0)
    if largest == 0 or room.total == 0:
        return start
    rows, limits = [cost * offers.numpy()], [float(room.total)]
    if room.per_head is not None:
        rows += [rows[0] * (ops.head().numpy() == head) for head in range(len(room.per_head))]
        limits += room.per_head.tolist()
    for op, above in enumerate(ops.parent.tolist()):
        if above >= 0:
            rows.append(np.zeros(count))
            rows[-1][[op, above]] = 1.0, -1.0
            limits.append(0.0)
    solution = milp(
        # Gains may be tiny compared with the solver's absolute tolerances.
        -gain / largest,
        integrality=np.ones(count),
        bounds=Bounds(executed.numpy().astype(float), (executed | offers).numpy().astype(float)),
        constraints=LinearConstraint(np.stack(rows), -np.inf, np.array(limits)),
        options={"mip_rel_gap": 0.0},
    )
    if solution.x is None:
        raise GracekvError(f"The integer program was not solved: {solution.message}")
    return ops.frontier(start, torch.from_numpy(solution.x > 0.5))


def floor_candidates(floor: Singleton, scores: Tensor, plan: BudgetPlan) -> Tensor | None:
    """The result of `Singleton.candidates`: f [L, G, N] float64, -inf for other tokens.

    Source: Eqs. (A2), (A3).
    """
    cap = math.floor(Fraction(str(floor.alpha)) * plan.base)
    if cap <= 0:
        return None
    relevance = scores.double()
    layers, heads, count = relevance.shape
    half, share = floor.pool // 2, floor.consensus
    average = relevance.mean(dim=(0, 1))
    mean, gate = average.tolist(), max(floor.gamma * float(average.mean()), 1e-300)
    ranked: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for layer, head in product(range(layers), range(heads)):
        values = relevance[layer, head].tolist()
        mixed = [(1 - share) * values[t] + share * mean[t] for t in range(count)]
        pooled = [max(mixed[max(0, t - half) : t + half + 1]) for t in range(count)]
        order = sorted(range(count), key=lambda t: (-pooled[t], t))
        sums = list(accumulate(values[t] for t in order))
        best: list[tuple[float, int]] = []
        for t, total in zip(order, sums, strict=True):
            if pooled[t] < gate or (best and total > floor.eta * sums[-1]):
                break
            best.append((pooled[t], t))
        ranked[layer, head] = best
    candidates = sum(len(best) for best in ranked.values())
    result = torch.full_like(relevance, -torch.inf)
    for (layer, head), best in ranked.items():
        size = max(1, len(best) * cap // candidates) if candidates > cap else len(best)
        for score, t in best[:size]:
            result[layer, head, t] = score
    return result


def realize_floor(
    floor: Singleton,
    forest: Forest,
    candidates: Tensor | None,
    plan: BudgetPlan,
    quota: Tensor | None,
) -> Frontier:
    """The result of `Singleton.realize`; candidates and quota are [L, G, ...] as there.

    Source: Eq. (A4).
    """
    frontier = Frontier.empty(forest, plan.base)
    if candidates is None:
        return frontier
    share = Fraction(str(floor.alpha)) * plan.base
    head_cap = math.floor(Fraction(str(floor.head_cap)) * share / (plan.layers * plan.heads))
    places = map(tuple, (candidates > -torch.inf).nonzero().tolist())
    order = [(-float(candidates[place]), *place) for place in places]
    for _, layer, head, t in sorted(order):
        node = _exact_node(forest, layer, head, int(forest.start[0]) + t)
        if node is None:
            continue
        added, split = frontier.added.clone(), frontier.split.clone()
        while (above := int(forest.parent[node])) >= 0:
            split[above] = True
            node = above
        added[node] = True
        tried = dataclasses.replace(frontier, added=added, split=split)
        entries = int(tried.entries_per_head()[layer, head])
        cap = head_cap if quota is None else min(head_cap, int(quota[layer, head]))
        if tried.spent <= math.floor(share) and entries <= cap:
            frontier = tried
    return dataclasses.replace(frontier, floor_spent=frontier.spent)


def _exact_node(forest: Forest, layer: int, head: int, position: int) -> int | None:
    """The node that holds this token as an original K/V pair, if the forest has one."""
    for node in range(forest.nodes):
        same_head = int(forest.tree[node]) // forest.slots == layer * forest.heads + head
        inside = int(forest.start[node]) <= position < int(forest.end[node])
        exact = int(forest.entries[node]) == int(forest.end[node] - forest.start[node])
        if same_head and inside and exact:
            return node
    return None


def adaptive_heads(quota: AdaptiveHeads, scores: Tensor, plan: BudgetPlan) -> list[list[int]]:
    """The shares that `AdaptiveHeads` returns, as lists [L][G]."""
    floor, units = Fraction(str(quota.floor)), plan.layers * plan.heads
    result = []
    for layer in range(plan.layers):
        flat = range(layer * plan.heads, (layer + 1) * plan.heads)
        pool = sum(plan.base // units + (unit < plan.base % units) for unit in flat)
        rows = scores[layer].double().tolist()
        ranked = sorted((-score, g, t) for g, row in enumerate(rows) for t, score in enumerate(row))
        if quota.rule == "safeguard":
            per_head = pool // plan.heads + plan.recent
            sure = max(math.floor(floor * per_head), 1 if floor > 0 else 0) - plan.recent
            by_head = [[token for token in ranked if token[1] == g] for g in range(plan.heads)]
            safe = [token for row in by_head for token in row[: max(sure, 0)]]
            ranked = safe + [token for token in ranked if token not in safe]
        winners = [g for _, g, _ in ranked[:pool]]
        counts = [winners.count(g) for g in range(plan.heads)]
        if quota.rule == "safeguard":
            result.append(counts)
            continue
        equal = floor * Fraction(pool, plan.heads)
        ideal = [(1 - floor) * count + equal for count in counts]
        shares = [math.floor(share) for share in ideal]
        rest = sorted(range(plan.heads), key=lambda g: (shares[g] - ideal[g], g))
        for g in rest[: pool - sum(shares)]:
            shares[g] += 1
        result.append(shares)
    return result
