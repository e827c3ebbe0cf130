"""The growth of trees directly from the rules: one node at a time, by exhaustive comparison.

Slow on purpose; the level-wise growth is tested equal to it.
"""

from __future__ import annotations

import math

from gracekv.tree.engines.reference import ReferenceDistortion


def refine_interval(
    evaluator: ReferenceDistortion, start: int, end: int, candidates: int = 16, reward: float = 0.05
) -> list[tuple[int, int]]:
    """The children that `binary_extract` gives to [start, end), by exhaustive comparison.

    Source: the paper, "Recursive refinement rule"; ties and forcing: departures 5.
    """
    context = evaluator.context
    whole = evaluator.node(start, end)

    cuts = {(start + end) // 2}
    known = context.curvature
    kappa = {t: 0.0 if known is None else float(known[t]) for t in range(start, end)}
    cuts.update(sorted(range(start + 1, end), key=lambda t: (-kappa[t], t))[:candidates])
    low, high = min(kappa.values()), max(kappa.values())
    best_cut, best_rho = -1, -math.inf
    for cut in sorted(cuts):
        bonus = (kappa[cut] - low) / (high - low) if high > low else 0.0
        rho = whole - evaluator.node(start, cut) - evaluator.node(cut, end) + reward * bonus
        if rho > best_rho:
            best_cut, best_rho = cut, rho

    origin = context.partition.region.start
    forced: dict[int, float] = {}
    if context.forced is not None:
        scores = context.forced[evaluator.layer, evaluator.head]
        own = {t: float(scores[t - origin]) for t in range(start, end)}
        forced = {t: score for t, score in own.items() if score > -math.inf}
    if forced:
        extracted = min(forced, key=lambda t: (-forced[t], t))
    else:
        masses = evaluator.masses(start, end)
        extracted = start + max(range(end - start), key=lambda i: (masses[i], -i))
    children = [(start, extracted), (extracted, extracted + 1), (extracted + 1, end)]
    children = [(a, b) for a, b in children if a < b]
    rho = (whole - sum(evaluator.node(a, b) for a, b in children)) / (len(children) - 1)
    return children if forced or rho > best_rho else [(start, best_cut), (best_cut, end)]


def grow_tree(
    evaluator: ReferenceDistortion, start: int, end: int
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Children of every non-leaf node of the tree over [start, end)."""
    tree: dict[tuple[int, int], list[tuple[int, int]]] = {}
    pending = [(start, end)]
    while pending:
        a, b = pending.pop()
        if b - a > 1:
            tree[a, b] = refine_interval(evaluator, a, b)
            pending.extend(tree[a, b])
    return tree
