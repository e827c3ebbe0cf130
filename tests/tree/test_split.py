"""Splitting in one compiled pass gives what looking up a judge's ends gives, to the bit."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from gracekv.segment import Partition
from gracekv.testing.trees import tree_context
from gracekv.tree import (
    REFINERS,
    Binary,
    BinaryExtract,
    Extract,
    Items,
    Midpoint,
    Nodes,
    Prototype,
    TreeContext,
    build_forest,
)
from gracekv.tree.prototype_numba import NumbaSplitter
from gracekv.tree.split import Split, TableSplitter
from gracekv.tree.workspace import Workspace

RULED = [
    BinaryExtract(),
    BinaryExtract(candidates=3, reward=0.5),
    BinaryExtract(candidates=0, reward=0.0),
    Binary(candidates=5),
    Binary(candidates=0, reward=0.3),
    Extract(),
    Midpoint(),
]


def problem(seed: int, slots: int, floor: bool, tied: bool) -> TreeContext:
    """Slots of a few tokens up to all of them; curvatures and floor scores full of ties."""
    context = tree_context(seed, context=70)
    region = context.partition.region
    rng = torch.Generator().manual_seed(seed)
    cuts = (
        torch.randperm(region.length - 1, generator=rng)[: slots - 1] + 1 + region.start
    ).tolist()
    bounds = torch.tensor(sorted({region.start, region.end, *cuts}))
    context = dataclasses.replace(context, partition=Partition(bounds))
    if tied:
        assert context.curvature is not None
        context = dataclasses.replace(context, curvature=(4 * context.curvature).round())
    if floor:
        score = torch.rand(context.scores.shape, generator=rng, dtype=torch.float64)
        chosen = torch.rand(score.shape, generator=rng) < 0.1
        context = dataclasses.replace(
            context, forced=torch.where(chosen, (3 * score).round(), -torch.inf)
        )
    return context


def same(one: Split, other: Split) -> None:
    for field in dataclasses.fields(Split):
        assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name


@pytest.mark.parametrize("refiner", RULED, ids=repr)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000), slots=st.integers(1, 12), floor=st.booleans(), tied=st.booleans()
)
def test_fused_splits_are_those_of_the_table(refiner, seed, slots, floor, tied):
    context = problem(seed, slots, floor, tied)
    items = Items.of(context, [0, 1], refiner.lifts_candidates)
    evaluator = Prototype(engine="numba").evaluator(
        context, [0, 1], items, Workspace(torch.device("cpu"))
    )
    fused, table = evaluator.splitter(refiner), TableSplitter(items, evaluator, refiner)
    assert isinstance(fused, NumbaSplitter)
    item = torch.arange(len(items.origin))
    roots = Nodes(item, torch.zeros_like(item), items.length)
    one, other = fused.roots(roots), table.roots(roots)
    assert torch.equal(one.distortion, other.distortion)
    assert torch.equal(one.drop, other.drop)
    rng = torch.Generator().manual_seed(seed)
    chosen = (items.length > 1) & (torch.rand(len(item), generator=rng) < 0.8)
    first = one.split(chosen)
    same(first, other.split(chosen))
    # Their children, and all nodes below.
    parent = torch.repeat_interleave(item[chosen], first.count)
    nodes, distortion = Nodes(parent, first.start, first.end), first.distortion
    while len(nodes.item):
        inner = nodes.length > 1
        nodes, distortion = nodes[inner], distortion[inner]
        found = fused(nodes, distortion)
        same(found, table(nodes, distortion))
        parent = torch.repeat_interleave(nodes.item, found.count)
        nodes, distortion = Nodes(parent, found.start, found.end), found.distortion


def test_what_numbers_cannot_say_is_looked_up() -> None:
    context = tree_context(0)
    items = Items.of(context, [0])
    evaluator = Prototype(engine="numba").evaluator(
        context, [0], items, Workspace(torch.device("cpu"))
    )
    fused = {name for name in REFINERS if evaluator.splitter(REFINERS.build(name)) is not None}
    assert fused == {"binary", "binary_extract", "extract", "midpoint"}
    torch_evaluator = Prototype(engine="torch").evaluator(
        context, [0], items, Workspace(torch.device("cpu"))
    )
    assert torch_evaluator.splitter(BinaryExtract()) is None


@pytest.mark.parametrize("refiner", ["binary_extract", "exhaustive"])
def test_any_number_of_threads_grows_the_same_trees(refiner: str) -> None:
    context = problem(4, 12, floor=True, tied=False)
    before = torch.get_num_threads()
    forests = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            forests.append(build_forest(context, Prototype(), REFINERS.build(refiner)))
    finally:
        torch.set_num_threads(before)
    for other in forests[1:]:
        for name in ("start", "end", "parent", "distortion", "split_gain", "add_gain"):
            assert torch.equal(getattr(forests[0], name), getattr(other, name)), name
