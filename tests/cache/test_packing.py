"""Packed entries against the equations, and values that packing must preserve bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.allocate import Frontier, Selection
from gracekv.cache import PrototypePacker, RaggedCache, RaggedEntries
from gracekv.errors import ShapeError
from gracekv.tree import REFINERS, Prototype, TreeContext, build_forest
from gracekv.tree.engines.reference import prototype_of
from gracekv.tree.merge import representative_positions
from support.trees import random_frontier, tree_context


def pack(context: TreeContext, frontier: Frontier) -> RaggedCache:
    selection = Selection.of_frontier(frontier)
    return PrototypePacker()(context.prefill, selection, context.scores, context.rule)


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), refiner=st.sampled_from(["binary_extract", "leaf_only"]))
def test_entries_match_the_reference(seed: int, refiner: str) -> None:
    context = tree_context(seed)
    prefill, region = context.prefill, context.partition.region
    frontier = random_frontier(build_forest(context, Prototype(), REFINERS.build(refiner)), seed)
    forest, kept = frontier.forest, frontier.kept
    cache = pack(context, frontier)
    assert cache.length == prefill.spans.length - 1
    for layer in range(prefill.layers):
        for head in range(prefill.kv_heads):
            keys, values, positions, log_m = cache.layers[layer].head(head)
            want: list[tuple[int, int]] = [(t, t + 1) for t in range(region.start)]
            mine = kept & (forest.head_of_node() == layer * prefill.kv_heads + head)
            nodes = [
                (int(forest.start[v]), int(forest.end[v]), int(forest.entries[v]))
                for v in torch.nonzero(mine).flatten()
            ]
            for a, b, entries in sorted(nodes):
                want += [(t, t + 1) for t in range(a, b)] if entries > 1 else [(a, b)]
            want += [(t, t + 1) for t in range(region.end, prefill.spans.length - 1)]
            assert len(keys) == len(want)
            for i, (a, b) in enumerate(want):
                entry = prototype_of(context, layer, head, a, b)
                assert int(positions[i]) == entry.position
                if b - a == 1:
                    assert torch.equal(keys[i], prefill.keys[layer][head, a])
                    assert torch.equal(values[i], prefill.values[layer][head, a])
                    assert log_m[i] == 0
                else:
                    for got, plain in ((keys[i], entry.key), (values[i], entry.value)):
                        torch.testing.assert_close(got.double(), plain, rtol=1e-4, atol=1e-5)
                    want_m = torch.tensor(entry.multiplicity).log()
                    torch.testing.assert_close(log_m[i], want_m, rtol=1e-4, atol=1e-5)
            assert bool((positions.diff() > 0).all())


def test_bytes_are_physical() -> None:
    context = tree_context(0)
    forest = build_forest(context, Prototype(), REFINERS.build("binary_extract"))
    layer = pack(context, random_frontier(forest, 0)).layers[0]
    assert layer.kv_bytes == 2 * layer.entries * context.prefill.head_dim * 4
    assert layer.keys.untyped_storage().nbytes() == layer.kv_bytes // 2
    assert layer.metadata_bytes == layer.entries * 8 + 3 * 8


@pytest.mark.parametrize(
    ("start", "end", "want"), [(0, 2, 0), (1, 3, 2), (0, 3, 1), (2, 6, 4), (3, 7, 4), (4, 6, 4)]
)
def test_absolute_positions_round_half_to_even(start: int, end: int, want: int) -> None:
    assert representative_positions(torch.tensor(start), torch.tensor(end)) == want


def test_ragged_layer_checks_its_shapes() -> None:
    states, each = torch.zeros(3, 4), torch.zeros(3)
    with pytest.raises(ShapeError, match="offsets"):
        RaggedEntries(states, states, each.int(), each, torch.tensor([0, 2]))
