"""The segment stage directly from the equations: loops in float64.

Slow on purpose; the fast versions are tested equal to these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gracekv.segment.curvature import Curvature
from gracekv.segment.curvature_dp import CurvatureDP

Floats = NDArray[np.float64]


def unit_states(hidden: Tensor, epsilon: float) -> Floats:
    """[n, D] rows divided by max(norm, epsilon). Source: Eq. (S2)."""
    rows = hidden.detach().cpu().double().numpy()
    return np.stack([row / max(float(np.linalg.norm(row)), epsilon) for row in rows])


def local_curvature(unit: Floats, window: int, epsilon: float) -> Floats:
    """kappa^(l,w) [T] of one layer's unit states [T, D] at one window size.

    Source: Eqs. (S3) to (S4).
    """
    length = len(unit)
    kappa = np.zeros(length)
    for i in range(window, length - window):
        mean_before = sum(unit[i - tau] for tau in range(window)) / window
        mean_after = sum(unit[i + tau] for tau in range(1, window + 1)) / window
        incoming, outgoing = unit[i] - mean_before, mean_after - unit[i]
        incoming = incoming / max(float(np.linalg.norm(incoming)), epsilon)
        outgoing = outgoing / max(float(np.linalg.norm(outgoing)), epsilon)
        kappa[i] = 1 - incoming @ outgoing
    return kappa


def stable_curvature(states: Sequence[Tensor], rule: Curvature) -> Floats:
    """kappa [T] from the sampled layers' states [T, D]. Source: Eq. (S5)."""
    units = [unit_states(hidden, rule.epsilon) for hidden in states]
    views = [local_curvature(x, window, rule.epsilon) for x in units for window in rule.windows]
    kappa = np.zeros(len(views[0]))
    for i in range(len(kappa)):
        at = [float(view[i]) for view in views]
        kappa[i] = np.mean(at) - rule.stability * np.std(at)
    return kappa


def median(signal: Sequence[float]) -> float:
    """The middle value, or the mean of the middle two."""
    ordered, half = sorted(signal), len(signal) // 2
    return ordered[half] if len(signal) % 2 else (ordered[half - 1] + ordered[half]) / 2


def robust_zscore(signal: Sequence[float], epsilon: float = 1e-6) -> Floats:
    """[T] normalised by median and MAD. Source: Eq. (S7)."""
    middle = median(signal)
    mad = median([abs(a - middle) for a in signal])
    return np.array([(a - middle) / (1.4826 * mad + epsilon) for a in signal])


def dispersion(states: Sequence[Tensor], start: int, end: int, epsilon: float) -> float:
    """Disp of the slot [start, end), relative to the region that the states [N, D] cover.

    Source: Eq. (S9).
    """
    total = 0.0
    for hidden in states:
        unit = unit_states(hidden[start:end], epsilon)
        steps = [unit[t + 1] - unit[t] for t in range(len(unit) - 1)]
        if len(steps) >= 2:
            mean = sum(steps) / len(steps)
            total += sum(float((d - mean) @ (d - mean)) for d in steps) / (len(steps) - 1)
    return total / len(states)


def boundary_score(kappa: Sequence[float], surprisal: Sequence[float], rule: CurvatureDP) -> Floats:
    """b [T] from kappa [T] and surprisal [T]. Source: Eq. (S8)."""
    epsilon = rule.curvature.epsilon
    turns = rule.curvature_weight * robust_zscore(kappa, epsilon)
    return turns + rule.surprisal_weight * robust_zscore(surprisal, epsilon)


def slot_profit(
    boundary: Floats, states: Sequence[Tensor], start: int, end: int, rule: CurvatureDP
) -> float:
    """The profit of the slot [start, end) in the objective; boundary [N] and states [N, D].

    Source: Eqs. (S10) and (S11).
    """
    reward = float(boundary[start - 1]) - rule.cut_cost if start > 0 else 0.0
    spread = dispersion(states, start, end, rule.curvature.epsilon)
    deviation = (end - start - rule.target_length) / rule.target_length
    return reward - rule.dispersion_weight * spread - rule.length_weight * deviation**2


def best_partition(profit: Floats, min_length: int) -> tuple[Floats, NDArray[np.int64]]:
    """Cut [0, N) into slots of greatest total profit; as `curvature_dp.best_partition`.

    Source: Eq. (S12).
    """
    length, max_length = profit.shape
    best = np.full(length + 1, -np.inf)
    best[0] = 0.0
    previous = [0] * (length + 1)

    def extend(end: int, shortest: int) -> None:
        for start in range(max(0, end - max_length), end - shortest + 1):
            total = best[start] + profit[start, end - start - 1]
            if total > best[end]:
                best[end], previous[end] = total, start

    for end in range(1, length + 1):
        extend(end, min_length)
    if best[length] == -np.inf:
        extend(length, 1)
    bounds = [length]
    while bounds[-1] > 0:
        bounds.append(previous[bounds[-1]])
    return best, np.array(bounds[::-1], dtype=np.int64)
