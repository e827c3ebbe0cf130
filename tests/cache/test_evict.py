"""Plain eviction."""

import pytest
import torch
from hypothesis import given

from gracekv.allocate import Frontier, Selection
from gracekv.cache import EvictPacker, PrototypePacker
from gracekv.tree import REFINERS, PrototypeRule, Unit, build_forest
from support.draws import bools, ints, some
from support.trees import random_frontier, tree_context


@given(seed=ints(0, 10_000), refiner=some(["binary", "leaf_only", "two_level"]), tied=bools())
def test_every_entry_is_an_original_token(seed, refiner, tied):
    context = tree_context(seed)
    frontier = random_frontier(build_forest(context, Unit(), REFINERS.build(refiner)), seed)
    worth = (context.scores * 10).round() if tied else context.scores
    prefill, region, forest = context.prefill, context.partition.region, frontier.forest
    cache = EvictPacker()(prefill, Selection.of_frontier(frontier), worth, PrototypeRule())
    covered = prefill.spans.length - 1
    assert cache.length == covered
    for layer in range(prefill.layers):
        for head in range(prefill.kv_heads):
            want = [*range(region.start), *range(region.end, covered)]
            mine = frontier.kept & (forest.head_of_node() == layer * prefill.kv_heads + head)
            for v in mine.nonzero().flatten().tolist():
                tokens = range(int(forest.start[v]), int(forest.end[v]))
                row = worth[layer, head]
                if int(forest.entries[v]) == 1:  # the best, earliest token of a coarse node
                    tokens = [max(tokens, key=lambda t: (float(row[t - region.start]), -t))]
                want += tokens
            keys, values, positions, log_m = cache.layers[layer].head(head)
            assert positions.tolist() == sorted(want)
            assert torch.equal(keys, prefill.keys[layer][head, sorted(want)])
            assert torch.equal(values, prefill.values[layer][head, sorted(want)])
            assert not log_m.any()


@pytest.mark.parametrize("packer", [EvictPacker(), PrototypePacker()])
@pytest.mark.parametrize("refiner", ["leaf_only", "binary"])
def test_the_last_prompt_token_is_never_packed(packer, refiner):
    # No suffix and no recent window: the region extends to the prompt's end.
    context = tree_context(3, recent=-9)
    assert context.partition.region.end == context.prefill.spans.length
    forest = build_forest(context, Unit(), REFINERS.build(refiner))
    added, covered = torch.ones(forest.trees, dtype=torch.bool), context.prefill.spans.length - 1
    splits = (~forest.is_leaf, torch.zeros(forest.nodes).bool())
    bought = (Frontier(forest, added, split, budget=10**6) for split in splits)
    chosen = map(Selection.of_frontier, bought)
    how = context.scores, context.rule
    everything, roots = (packer(context.prefill, selection, *how) for selection in chosen)
    for layer in everything.layers:
        for head in range(layer.heads):
            assert layer.head(head)[2].tolist() == list(range(covered))
    # Roots that extend to the end merge only covered tokens.
    assert int(roots.layers[0].positions.max()) < covered
