"""The report on a cache agrees with the frontier and the packed tensors."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv import Pipeline, recipes
from gracekv.errors import ReportError
from gracekv.fit.values_and_mass import LEAST, MOST
from gracekv.report.entries import result_entries
from support.covering import cases

RECIPES = [name for name in recipes.names() if not Pipeline.named(name).keep_all]


def plain(entries):
    """[head] -> list of (start, end, multiplicity, depth, floor), with loops."""
    lists = []
    for unit in range(entries.layers * entries.heads):
        at = range(int(entries.offsets[unit]), int(entries.offsets[unit + 1]))
        lists.append([(int(entries.start[e]), int(entries.end[e])) for e in at])
    return lists


def widths(layer):
    """(head, position) of each entry of a layer, and its bits per number."""
    for part in layer.parts:
        bits = 32 if part is layer.exact else part.coding.bits
        for head in range(layer.heads):
            yield from (((head, int(p)), bits) for p in part.rows(head, head + 1).positions)


@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=cases(2, 4))
@given(seed=st.integers(0, 99), ratio=st.sampled_from(["1.3", 2, 4, 7]))
def test_intervals_are_the_packed_ones(make, recipe, seed, ratio):
    result = make(recipe, ratio, seed=seed, context=64)
    if result.run.plan.keeps_all:  # quantised, all entries fit
        return
    entries, spans = result_entries(result), result.prompt.spans
    first, last = entries.region
    assert (first, last) == (spans.context_start, spans.context_end)
    assert torch.equal(entries.offsets.diff(), result.accounting.entries.flatten())
    assert int(entries.offsets[-1]) == result.accounting.spent
    merges = result.pipeline.pack.represents == "node"
    layouts = result.run.selection.layouts(result.prefill.spans.length, result.prefill.keys)
    for layer, layout in enumerate(layouts):
        packed = result.run.cache.layers[layer]
        for head in range(entries.heads):
            mine = plain(entries)[layer * entries.heads + head]
            inside = [p for p in packed.head(head)[2].tolist() if first <= p < last]
            assert all(a <= p < b for (a, b), p in zip(mine, inside, strict=True))
            rows = layout.head == head
            starts, ends = layout.start[rows].tolist(), layout.end[rows].tolist()
            nodes = [(a, b) for a, b in zip(starts, ends, strict=True) if first <= a < last]
            assert mine == (nodes if merges else [(p, p + 1) for p in inside])
        if packed.coded:
            here = slice(*entries.offsets[[layer * entries.heads, (layer + 1) * entries.heads]])
            stored = [bits for (_, p), bits in sorted(widths(packed)) if first <= p < last]
            assert entries.bits[here].tolist() == stored
    assert (entries.bits is None) == (not packed.coded)
    fit = result.pipeline.fit
    least, most = (1, 1) if fit.name == "none" else (LEAST, MOST)
    if fit.name == "least_squares":
        least, most = fit.least, fit.most
    assert (entries.multiplicity <= most * entries.length.float() + 1e-3).all()
    assert (entries.multiplicity >= least - 1e-3).all()


@settings(max_examples=10)
@given(seed=st.integers(0, 99))
def test_depth_and_floor_are_those_of_the_nodes(make, seed):
    result = make("gracekv", 3, seed=seed)
    entries, run = result_entries(result), result.run
    forest, floor = run.forest, run.floor
    known = {
        (int(forest.tree[v]) // forest.slots, int(forest.start[v])): v
        for v in torch.nonzero(run.frontier.kept).flatten().tolist()
    }
    heads = entries.head_of_entry().tolist()
    for e, (head, start) in enumerate(zip(heads, entries.start.tolist(), strict=True)):
        node = known.get((head, start))
        if node is None:
            # The recent window, which no tree covers.
            assert int(entries.depth[e]) == -1
            assert not bool(entries.floor[e])
            continue
        assert int(entries.depth[e]) == int(forest.level[node])
        parent = int(forest.parent[node])
        bought = floor.added[node] if parent < 0 else floor.split[parent]
        assert bool(entries.floor[e]) == bool(bought)
    assert 0 < int(entries.floor.sum()) <= result.accounting.floor_spent


@settings(max_examples=10)
@given(seed=st.integers(0, 99), recipe=st.sampled_from(["gracekv", "snapkv", "fullkv"]))
def test_lookups_agree_with_loops(make, seed, recipe):
    entries = result_entries(make(recipe, 4, seed=seed, context=48))
    lists, (first, last) = plain(entries), entries.region
    for position in range(first, last):
        holders = entries.entry_of_token(position).tolist()
        for unit, intervals in enumerate(lists):
            found = [i for i, (a, b) in enumerate(intervals) if a <= position < b]
            assert holders[unit] == (int(entries.offsets[unit]) + found[0] if found else -1)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("recipe", ["gracekv", "gracekv-no-multiresolution", "snapkv", "fullkv"])
def test_a_prompt_that_ends_with_its_context(make, recipe, window):
    fields = {"window": {"size": window, "minimum": window}}
    result = make(recipe, "1.5", question=0, tail=0, fields=fields)
    entries, spans = result_entries(result), result.prompt.spans
    # The last token is fed again and is not in the cache; a node that held it ends before it.
    assert entries.region == (spans.context_start, spans.length - 1)
    assert int(entries.end.max()) <= spans.length - 1
    if recipe == "gracekv":
        assert int(entries.end.max()) == spans.length - 1
    for unit, intervals in enumerate(plain(entries)):
        packed = result.run.cache.layers[unit // 2].head(unit % 2)[2].tolist()
        assert len(intervals) == sum(p >= spans.context_start for p in packed)


def loaded(run):
    """A run as loaded by `gracekv.load`."""
    unknown = ("partition", "relevance", "forest", "frontier", "floor", "selection")
    return dataclasses.replace(run, **dict.fromkeys(unknown))


def test_of_a_loaded_result_only_original_tokens_are_known(make):
    evicted = make("snapkv", 3)
    before = result_entries(evicted)
    evicted.run = loaded(evicted.run)
    assert torch.equal(result_entries(evicted).start, before.start)
    assert result_entries(evicted).depth is None
    merged = make("gracekv", 3)
    merged.run = loaded(merged.run)
    with pytest.raises(ReportError, match="loaded from a file or extended"):
        result_entries(merged)
    assert (result_entries(make("gracekv", 1)).length == 1).all()


def test_a_packer_that_does_not_follow_the_frontier_is_told(make):
    result = make("gracekv", 3)
    layer = result.run.cache.layers[0]
    moved = layer.positions.clone()
    moved[layer.offsets[0] : layer.offsets[1]] = moved[layer.offsets[0] : layer.offsets[1]].flip(0)
    broken = dataclasses.replace(layer, positions=moved)
    cache = dataclasses.replace(result.run.cache, layers=(broken, *result.run.cache.layers[1:]))
    result.run = dataclasses.replace(result.run, cache=cache)
    with pytest.raises(ReportError, match="did not keep the selected entries in order"):
        result_entries(result)


@pytest.mark.parametrize("recipe", ["gracekv", "snapkv"])
@settings(max_examples=5)
@given(seed=st.integers(0, 99))
def test_how_far_values_moved_is_told_of_every_entry(make, recipe, seed):
    plain = make(recipe, 3, seed=seed, fields={"fit": "none"})
    fitted = make(recipe, 3, seed=seed, fields={"fit": "values_and_mass"})
    assert result_entries(plain).value_change is None
    first, last = result_entries(fitted).region
    expected = []
    for before, after in zip(plain.run.cache.layers, fitted.run.cache.layers, strict=True):
        for head in range(before.heads):
            rows = zip(before.head(head)[1], after.head(head)[1], before.head(head)[2], strict=True)
            for old, new, position in rows:
                if first <= position < last:
                    expected.append(float((new - old).norm() / old.norm()))
    wanted = torch.tensor(expected).clamp(max=2.55)
    assert float(wanted.max()) > 0.02
    # 0.02 for rounding and for the products of the fit.
    torch.testing.assert_close(result_entries(fitted).value_change, wanted, rtol=0, atol=0.02)
