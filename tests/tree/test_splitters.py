"""`NumbaSplitter` gives the same splits as `TableSplitter` on the same engine."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from gracekv.segment import Partition
from gracekv.tree import REFINERS, Binary, BinaryExtract, Extract, Nodes, Prototype, build_forest
from gracekv.tree.distortion import TableSplitter
from gracekv.tree.engines.numba import NumbaSplitter
from gracekv.tree.tree_batch import TreeContext
from support.interval_costs import evaluator_of
from support.splits import assert_same_splits
from support.trees import tree_context, with_floor


def problem(seed: int, slots: int, floor: bool, tied: bool) -> TreeContext:
    """Slots of a few tokens up to all of them, with many ties in curvature and floor scores."""
    context = tree_context(seed, context=70)
    region = context.partition.region
    rng = torch.Generator().manual_seed(seed)
    places = torch.randperm(region.length - 1, generator=rng)[: slots - 1]
    bounds = torch.tensor(sorted({region.start, region.end, *(places + 1 + region.start).tolist()}))
    context = dataclasses.replace(context, partition=Partition(bounds))
    if tied:
        assert context.curvature is not None
        context = dataclasses.replace(context, curvature=(4 * context.curvature).round())
    return with_floor(context, seed) if floor else context


@pytest.mark.parametrize("refiner", [
    BinaryExtract(), BinaryExtract(candidates=3, reward=0.5),
    BinaryExtract(candidates=0, reward=0.0), Binary(candidates=5),
    Binary(candidates=0, reward=0.3), Extract(),
], ids=repr)  # fmt: skip
@settings(max_examples=15)
@given(seed=st.integers(0, 9999), slots=st.integers(1, 12), floor=st.booleans(), tied=st.booleans())
@example(seed=381, slots=1, floor=False, tied=False)  # no root splits
def test_numba_splits_are_those_of_the_table(refiner, seed, slots, floor, tied):
    context = problem(seed, slots, floor, tied)
    evaluator, batch = evaluator_of(context, "numba")
    splitter, table = evaluator.splitter(refiner), TableSplitter(batch, evaluator, refiner)
    assert isinstance(splitter, NumbaSplitter)
    roots = batch.roots()
    one, other = splitter.roots(roots), table.roots(roots)
    torch.testing.assert_close(one.distortion, other.distortion, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(one.drop, other.drop, rtol=1e-5, atol=1e-7)
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.nonzero((roots.length > 1) & (torch.rand(len(roots), generator=rng) < 0.8))[:, 0]
    _, forced = batch.sums(roots)
    split, wanted_split = (x.split(chosen, forced[chosen]) for x in (one, other))
    nodes, reward = roots[chosen], getattr(refiner, "reward", 0.0)
    # The roots, their children, and all nodes below.
    while len(nodes):
        assert_same_splits(context, batch, nodes, split, wanted_split, reward)
        tree = nodes.tree[:, None].expand(split.start.shape)
        inner = split.end - split.start > 1
        nodes = Nodes(tree[inner], split.start[inner], split.end[inner])
        if len(nodes):
            args = (nodes, split.distortion[inner], batch.sums(nodes)[1])
            split, wanted_split = splitter(*args), table(*args)


def test_only_refiners_with_a_rule_have_a_numba_splitter() -> None:
    context = tree_context(0)
    evaluator, _ = evaluator_of(context, "numba", layers=[0])
    names = {name for name in REFINERS if evaluator.splitter(REFINERS.build(name)) is not None}
    assert names == {"binary", "binary_extract", "extract"}
    torch_evaluator, _ = evaluator_of(context, "torch", layers=[0])
    assert torch_evaluator.splitter(BinaryExtract()) is None


def test_any_number_of_threads_grows_the_same_trees(threads: Callable[[int], None]) -> None:
    context = problem(4, 12, floor=True, tied=False)
    forests = []
    for count in (1, 2, 5):
        threads(count)
        forests.append(build_forest(context, Prototype(), BinaryExtract()))
    # Bitwise: the kernels guarantee the same sums for any number of threads.
    for other in forests[1:]:
        for name in ("start", "end", "parent", "distortion", "split_gain", "add_gain"):
            assert torch.equal(getattr(forests[0], name), getattr(other, name)), name
