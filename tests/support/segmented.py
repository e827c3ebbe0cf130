"""Segmentation by curvature, with every step from the reference."""

import numpy as np

from gracekv.segment import reference
from gracekv.segment.curvature import hidden_at
from gracekv.segment.surprisal import Surprisal


def by_reference(prefill, region, rule):
    """kappa [T], b [T], profits [N, n_max] and the bounds, all from the reference."""
    states = hidden_at(prefill, rule.curvature.depths)
    kappa = reference.stable_curvature(states, rule.curvature)
    surprisal = prefill.observation(Surprisal()).tolist()
    score = reference.boundary_score(kappa.tolist(), surprisal, rule)
    inside = [hidden[region.start : region.end] for hidden in states]
    boundary = score[region.start : region.end]
    profit = np.full((region.length, rule.max_length), np.nan)
    for a in range(region.length):
        for n in range(1, min(rule.max_length, region.length - a) + 1):
            profit[a, n - 1] = reference.slot_profit(boundary, inside, a, a + n, rule)
    _, bounds = reference.best_partition(profit, rule.min_length)
    return kappa, score, profit, bounds + region.start
