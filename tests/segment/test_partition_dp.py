from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.segment import curvature_dp, reference
from support.draws import SEEDS, bools, ints


def best_partition(profit, min_length):
    found = curvature_dp.best_partition(torch.from_numpy(profit), min_length)
    return tuple(x.numpy() for x in found)


@st.composite
def problems(draw, longest: int):
    """A profit table and a minimum length, with few distinct integer profits, so ties abound."""
    max_length = draw(ints(1, 9))
    min_length = draw(ints(1, max_length))
    length = draw(ints(1, longest))
    rng = np.random.default_rng(draw(SEEDS))
    profit = rng.integers(-2, 3, (length, max_length)).astype(float)
    if draw(bools()):
        profit += rng.normal(size=profit.shape)
    return profit, min_length


def all_partitions(length: int, shortest: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Every bounds tuple of [0, length) into slots of shortest..longest tokens."""
    if length == 0:
        yield (0,)
    for last in range(shortest, min(longest, length) + 1):
        for head in all_partitions(length - last, shortest, longest):
            yield (*head, length)


def permitted(length: int, shortest: int, longest: int) -> list[tuple[int, ...]]:
    """All partitions within the limits; if none, those in which only the last slot is too short."""
    within = list(all_partitions(length, shortest, longest))
    if within:
        return within
    return [
        (*head, length)
        for last in range(1, min(longest, length) + 1)
        for head in all_partitions(length - last, shortest, longest)
    ]


def total(profit: np.ndarray, bounds: tuple[int, ...]) -> float:
    return sum(profit[start, end - start - 1] for start, end in pairwise(bounds))


@given(problem=problems(longest=60))
def test_matches_reference(problem):
    np.testing.assert_equal(best_partition(*problem), reference.best_partition(*problem))


@given(problem=problems(longest=13))
def test_is_the_optimum_of_all_partitions_and_ties_go_to_the_earliest(problem):
    profit, min_length = problem
    length, max_length = profit.shape
    best, bounds = best_partition(profit, min_length)
    candidates = permitted(length, min_length, max_length)
    top = max(total(profit, candidate) for candidate in candidates)
    assert best[-1] == pytest.approx(top)
    if (profit == profit.round()).all():
        # Integers add up exactly, so ties are exact: the last cut is as early as it can be,
        # then the one before it, and so on.
        optimal = [c for c in candidates if total(profit, c) == top]
        assert tuple(bounds) == min(optimal, key=lambda c: c[::-1])


@given(problem=problems(longest=60))
def test_never_reads_slots_that_leave_the_region(problem):
    profit, min_length = problem
    poisoned = profit.copy()
    length, max_length = profit.shape
    poisoned[np.arange(length)[:, None] + np.arange(1, max_length + 1) > length] = np.nan
    clean, dirty = (best_partition(table, min_length) for table in (profit, poisoned))
    np.testing.assert_equal(dirty, clean)
