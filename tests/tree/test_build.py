"""Forests: shape invariants for every refiner, and the paper's trees against the reference."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.allocate.operations import Operations
from gracekv.errors import ConfigError
from gracekv.tree import (
    DISTORTIONS,
    REFINERS,
    BinaryExtract,
    DistortionEvaluator,
    IntervalCosts,
    Nodes,
    Prototype,
    build_forest,
)
from gracekv.tree import distortion as distortion_module
from gracekv.tree.engines.reference import ReferenceDistortion
from gracekv.tree.reference import grow_tree
from gracekv.tree.tree_batch import TreeBatch, TreeContext, scratch_bytes
from support.covering import cases
from support.interval_costs import evaluator_of
from support.splits import assert_same_tree, children_of
from support.trees import assert_same_growth, tree_context, with_floor


@pytest.mark.parametrize("distortion", list(DISTORTIONS))
@pytest.mark.parametrize("refiner", list(REFINERS))
@settings(max_examples=6)
@given(seed=st.integers(0, 1000), floor=st.booleans())
def test_forest_invariants(distortion: str, refiner: str, seed: int, floor: bool) -> None:
    context = tree_context(seed)
    context = with_floor(context, seed) if floor else context
    forest = build_forest(context, DISTORTIONS.build(distortion), REFINERS.build(refiner))
    bounds, slots = context.partition.bounds, context.partition.slots
    roots = forest.tree[: forest.trees]
    assert torch.equal(roots, torch.arange(forest.trees))
    assert torch.equal(forest.start[: forest.trees], bounds[:-1][roots % slots])
    assert torch.equal(forest.end[: forest.trees], bounds[1:][roots % slots])
    for v in range(forest.nodes):
        count, first = int(forest.child_count[v]), int(forest.first_child[v])
        if count == 0:
            assert first == -1
            assert int(forest.length[v]) == 1 or refiner == "leaf_only"
            continue
        kids = torch.arange(first, first + count)
        assert count >= 2
        assert (forest.parent[kids] == v).all()
        assert (forest.tree[kids] == forest.tree[v]).all()
        assert (forest.level[kids] == forest.level[v] + 1).all()
        assert torch.equal(forest.end[kids[:-1]], forest.start[kids[1:]])
        assert forest.start[kids[0]] == forest.start[v]
        assert forest.end[kids[-1]] == forest.end[v]
        # Value conservation, Eq. (V6): bottom-up, so exact.
        whole = pytest.approx(float(forest.relevance[v]), rel=1e-14)
        assert float(forest.relevance[kids].sum()) == whole
    # All operations of a tree together add one entry per token (FullKV recovery).
    ops = Operations.of(forest)
    cost = torch.zeros(forest.trees, dtype=torch.int64).index_add_(0, ops.tree, ops.cost)
    assert torch.equal(cost, forest.length[: forest.trees])
    whole = context.scores.double().sum(-1).flatten()
    per_head = torch.zeros_like(whole)
    per_head.index_add_(0, forest.head_of_node()[: forest.trees], forest.relevance[: forest.trees])
    torch.testing.assert_close(per_head, whole)


@dataclasses.dataclass
class FastEvaluator:
    """The reference's interface on top of an engine, one node at a time."""

    context: TreeContext
    batch: TreeBatch
    evaluator: DistortionEvaluator
    layer: int
    tree: int

    def __post_init__(self) -> None:
        self.head = self.tree // self.context.partition.slots
        self.slot_start = int(self.batch.slot_start[self.tree])
        self.costs = functools.cache(self._costs)

    def _costs(self, start: int, end: int) -> IntervalCosts:
        bounds = (self.tree, start - self.slot_start, end - self.slot_start)
        return self.evaluator(Nodes(*(torch.tensor([x]) for x in bounds)))

    def node(self, start: int, end: int) -> float:
        return float(self.costs(start, end).prefix[0, -1])

    def masses(self, start: int, end: int) -> list[float]:
        return self.costs(start, end).mass[0].tolist()


@pytest.mark.parametrize("floor", [False, True])
@settings(max_examples=cases(5, 12))
@given(seed=st.integers(0, 1000))
def test_growth_matches_the_reference(floor: bool, seed: int) -> None:
    """Apart from ties within rounding, the trees are the reference's."""
    context = tree_context(seed)
    context = with_floor(context, seed) if floor else context
    forest = build_forest(context, Prototype(), BinaryExtract())
    bounds = context.partition.bounds.tolist()
    for layer in range(context.prefill.layers):
        evaluator, batch = evaluator_of(context, "auto", layers=[layer])
        for tree in range(len(batch.tree_id)):
            one = FastEvaluator(context, batch, evaluator, layer, tree)
            slot = tree % context.partition.slots
            want = grow_tree(one, bounds[slot], bounds[slot + 1])  # type: ignore[arg-type]
            root = (bounds[slot], bounds[slot + 1])
            got = children_of(forest, int(batch.tree_id[tree]))
            head = int(batch.tree_id[tree]) // context.partition.slots
            assert_same_tree(context, head, got, want, root, BinaryExtract().reward)


@settings(max_examples=cases(3, 6))
@given(seed=st.integers(0, 1000))
def test_gains_match_the_definitions(seed: int) -> None:
    context = tree_context(seed)
    forest = build_forest(context, Prototype(), BinaryExtract())
    evaluators = {}
    for tree in range(forest.trees):
        head, slot = divmod(tree, context.partition.slots)
        layer, g = divmod(head, context.prefill.kv_heads)
        evaluator = evaluators.setdefault(head, ReferenceDistortion(context, layer, g, Prototype()))
        a, b = context.partition.bounds[slot : slot + 2].tolist()
        omega = float(context.sensitivity[layer, g])
        # A gain is a difference: its error is relative to the operands.
        drop, node = evaluator.drop(a, b), evaluator.node(a, b)
        scale = omega * float(forest.relevance[tree]) * (drop + node)
        want = omega * float(forest.relevance[tree]) * (drop - node)
        assert float(forest.add_gain[tree]) == pytest.approx(want, abs=2e-4 * scale)
        spans = list(zip(forest.start.tolist(), forest.end.tolist(), strict=True))
        for node, kids in children_of(forest, tree).items():
            nodes = torch.nonzero(forest.tree == tree).flatten().tolist()
            v = next(v for v in nodes if spans[v] == node)
            parts = [evaluator.node(*node), *(evaluator.node(*kid) for kid in kids)]
            weighted = omega * float(forest.relevance[v])
            want, scale = weighted * (parts[0] - sum(parts[1:])), weighted * sum(parts)
            assert float(forest.split_gain[v]) == pytest.approx(want, abs=2e-4 * scale)


def test_curvature_refiners_say_what_they_miss() -> None:
    context = dataclasses.replace(tree_context(0), curvature=None)
    with pytest.raises(ConfigError, match="candidates=0"):
        build_forest(context, Prototype(), BinaryExtract())
    build_forest(context, Prototype(), BinaryExtract(candidates=0, reward=0.0))


@pytest.mark.parametrize("refiner", ["binary_extract", "extract", "binary"])
@settings(max_examples=4)
@given(seed=st.integers(0, 1000))
def test_engines_agree_on_paths_to_floor_candidates(refiner: str, seed: int) -> None:
    """The numba engine computes only the two sides of a candidate that must be extracted."""
    assert_same_growth(with_floor(tree_context(seed), seed), "numba", refiner)


def test_nodes_of_similar_length_are_evaluated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(distortion_module._SMALL_GRID, "cpu", 0)
    assert_same_growth(tree_context(7), "numba")


def test_a_cpu_gets_what_its_cache_bears() -> None:
    assert scratch_bytes(torch.device("cpu")) == 3 * 2**24


@pytest.mark.parametrize(("free", "unused", "want"), [
    (2**40, 0, 2**31), (2**32, 0, 2**29), (2**20, 0, 3 * 2**24),
    # Memory that torch's allocator has reserved but does not use counts as free.
    (0, 2**32, 2**29), (2**31, 2**31, 2**29),
], ids=["much", "some", "none", "reserved", "both"])  # fmt: skip
def test_a_gpu_gives_an_eighth_of_what_is_free(
    free: int, unused: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, properties = 2**33, SimpleNamespace(is_integrated=False)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 2**40))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: used)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: used + unused)
    assert scratch_bytes(torch.device("cuda", 0)) == want
    # One that shares the host's memory, of which CUDA does not know what is free.
    properties.is_integrated = True
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**32))
    monkeypatch.setattr("psutil.LINUX", False)
    assert scratch_bytes(torch.device("cuda", 0)) == min(2**31, (2**32 + unused) // 8)
    # AMD's may have a part of it for itself.
    monkeypatch.setattr("torch.version.hip", "7.1")
    assert scratch_bytes(torch.device("cuda", 0)) == want
