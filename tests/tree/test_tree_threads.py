"""Trees grown by the compiled engine are the same to the bit on any number of threads."""

import dataclasses

import pytest
import torch

pytest.importorskip("numba")

from gracekv.segment import Partition
from gracekv.tree import REFINERS, Prototype, TreeContext, build_forest
from support.trees import tree_context


def problem(seed: int, slots: int) -> TreeContext:
    """Slots of a few tokens up to all of them, and floor scores full of ties."""
    context = tree_context(seed, context=70)
    region = context.partition.region
    rng = torch.Generator().manual_seed(seed)
    cuts = (
        torch.randperm(region.length - 1, generator=rng)[: slots - 1] + 1 + region.start
    ).tolist()
    bounds = torch.tensor(sorted({region.start, region.end, *cuts}))
    context = dataclasses.replace(context, partition=Partition(bounds))
    score = torch.rand(context.scores.shape, generator=rng, dtype=torch.float64)
    chosen = torch.rand(score.shape, generator=rng) < 0.1
    return dataclasses.replace(context, forced=torch.where(chosen, (3 * score).round(), -torch.inf))


@pytest.mark.parametrize("refiner", ["binary_extract", "exhaustive"])
def test_any_number_of_threads_grows_the_same_trees(refiner: str) -> None:
    context = problem(4, 12)
    before = torch.get_num_threads()
    forests = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            forests.append(build_forest(context, Prototype(), REFINERS.build(refiner)))
    finally:
        torch.set_num_threads(before)
    # To the bit: the kernels promise the same sums for any number of threads.
    for other in forests[1:]:
        for name in ("start", "end", "parent", "distortion", "split_gain", "add_gain"):
            assert torch.equal(getattr(forests[0], name), getattr(other, name)), name
