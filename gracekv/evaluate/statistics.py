"""Means over tasks with bootstrap intervals, and paired comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Values = NDArray[np.float64]

RESAMPLES = 9_999
LEVEL = 0.95
_SEED = 0
# Numbers held at once while resampling.
_BATCH = 1 << 22


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval.

    Attributes:
        mean: mean of the tasks' means.
        low: the interval's lower end; NaN where a task has fewer than two samples.
        high: its upper end; NaN likewise.
        samples: number of samples.
    """

    mean: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A method against another one on the same samples.

    Attributes:
        delta: mean difference, method minus reference.
        wins: samples on which the method is better.
        ties: samples with equal values.
        losses: samples on which it is worse.
        p: two-sided sign-flip permutation test of no difference.
    """

    delta: Interval
    wins: int
    ties: int
    losses: int
    p: float


def interval(tasks: Sequence[Values]) -> Interval:
    """The unweighted mean of the tasks' means, with a percentile bootstrap of its samples.

    Every task is resampled by itself, so that none gains weight. A paired comparison is the
    interval of the differences. The random stream is fixed: the same rows give the same interval.
    """
    tasks = [np.asarray(values, dtype=np.float64) for values in tasks]
    count = sum(len(values) for values in tasks)
    mean = _mean_of_means(*tasks)
    if min(len(values) for values in tasks) < 2:
        return Interval(float(mean), math.nan, math.nan, count)
    if all(np.ptp(values) == 0 for values in tasks):
        return Interval(float(mean), float(mean), float(mean), count)
    found = stats.bootstrap(
        tuple(tasks),
        _mean_of_means,
        n_resamples=RESAMPLES,
        batch=max(1, _BATCH // count),
        vectorized=True,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return Interval(float(mean), float(found.low), float(found.high), count)


def compare(method: Sequence[Values], reference: Sequence[Values], higher: bool) -> Comparison:
    """A paired comparison; both hold the same samples of the same tasks, in the same order."""
    differences = [np.asarray(a) - np.asarray(b) for a, b in zip(method, reference, strict=True)]
    every = np.concatenate(differences)
    better = every > 0 if higher else every < 0
    ties = int((every == 0).sum())
    wins = int(better.sum())
    # Weighted so that their sum is the mean of the tasks' means.
    weighted = np.concatenate([d / (len(d) * len(differences)) for d in differences])
    return Comparison(interval(differences), wins, ties, len(every) - wins - ties, _p(weighted))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjustment of p-values that are looked at together, in the given order."""
    adjusted = [0.0] * len(p)
    largest = 0.0
    for rank, at in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[at]))
        adjusted[at] = largest
    return adjusted


def _p(differences: Values) -> float:
    changed = differences[differences != 0]
    if len(changed) < 2:
        # One sample flips to its mirror image: both are as extreme.
        return 1.0
    found = stats.permutation_test(
        (changed,),
        np.sum,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        batch=max(1, _BATCH // len(changed)),
        vectorized=True,
        rng=np.random.default_rng(_SEED),
    )
    return float(found.pvalue)


def _mean_of_means(*tasks: Values, axis: int = -1) -> Any:
    return np.mean([np.mean(values, axis=axis) for values in tasks], axis=0)
