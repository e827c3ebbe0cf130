"""D2O's merging: against plain loops, by construction, and reduced to plain eviction."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv import Budget
from gracekv.cache.d2o import best_matches
from gracekv.cache.reference import d2o_matches, d2o_merge, d2o_threshold
from gracekv.testing import synthetic_prefill
from support.token_pipelines import pipeline

WINDOW = {"size": 4, "minimum": 1}


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(4, 60),
    prefix=st.integers(0, 4),
    quota=st.sampled_from(["per_head", "global", "density"]),
    ratio=st.floats(1.1, 4.0),
)
def test_equals_the_plain_loop(seed, length, prefix, quota, ratio):
    prefill = synthetic_prefill(dim=8, context=length, prefix=prefix, seed=seed)
    run = pipeline("d2o", quota=quota, window={"size": 1, "minimum": 1}).run(
        prefill, Budget.ratio(ratio)
    )
    start, end = prefill.spans.context_start, prefill.spans.context_end
    for layer, packed in enumerate(run.cache.layers):
        keys, values = prefill.keys[layer][:, start:end], prefill.values[layer][:, start:end]
        heads = range(prefill.kv_heads)
        kept = [[t - start for t in packed.head(g)[2].tolist() if start <= t < end] for g in heads]
        matches = [d2o_matches(keys[g], kept[g]) for g in heads]
        tau = d2o_threshold(matches)
        for g in heads:
            got_keys, got_values, positions, log_m = packed.head(g)
            want_keys = prefill.keys[layer][g].double().clone()
            want_values = prefill.values[layer][g].double().clone()
            for c in kept[g]:
                # A cosine within rounding of the threshold may fall on either side of it.
                accepted = [
                    (i, u) for i, (u, to) in matches[g].items() if to == c and u >= tau - 1e-7
                ]
                want_keys[start + c] = d2o_merge(keys[g], c, accepted)
                want_values[start + c] = d2o_merge(values[g], c, accepted)
            at = positions.long()
            torch.testing.assert_close(got_keys.double(), want_keys[at], rtol=2e-5, atol=2e-6)
            torch.testing.assert_close(got_values.double(), want_values[at], rtol=2e-5, atol=2e-6)
            assert not log_m.any()


def one_hot_keys(prefill, clusters):
    """The prefill with keys that point along one axis each: token t along axis clusters[t]."""
    axes = torch.nn.functional.one_hot(torch.tensor(clusters), prefill.head_dim).float()
    # Powers of two, so that every cosine is exactly 0 or 1.
    size = 2.0 ** (torch.arange(len(clusters))[:, None] % 3)
    keys = tuple((axes * size).expand_as(k).contiguous() for k in prefill.keys)
    return dataclasses.replace(prefill, keys=keys)


def test_one_hot_clusters_merge_into_their_own():
    plain = synthetic_prefill(dim=8, context=40, prefix=2, question=3, tail=1, seed=1)
    clusters = [t % 6 for t in range(plain.spans.length)]
    prefill = one_hot_keys(plain, clusters)
    run = pipeline("d2o", window=WINDOW).run(prefill, Budget.ratio(2))
    merged = 0
    for layer, packed in enumerate(run.cache.layers):
        for g in range(prefill.kv_heads):
            keys, values, positions, _ = packed.head(g)
            kept = [t for t in positions.tolist() if 2 <= t < 42]
            # Cosines are 1 in a cluster and 0 across: the earliest kept member takes them all.
            leaders = {
                c: min(t for t in kept if clusters[t] == c) for c in map(clusters.__getitem__, kept)
            }
            dropped = [t for t in range(2, 42) if t not in kept]
            assert set(map(clusters.__getitem__, dropped)) <= set(leaders)
            for i, t in enumerate(positions.tolist()):
                leads = leaders.get(clusters[t]) == t
                mine = [u for u in dropped if leads and clusters[u] == clusters[t]]
                rows = prefill.values[layer][g][[t, *mine]]
                torch.testing.assert_close(values[i], rows.mean(0))
                # A merged key stays on its axis.
                assert int(keys[i].argmax()) == clusters[t]
                assert int((keys[i] != 0).sum()) == 1
                merged += len(mine)
    assert merged == 2 * 2 * 20


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_merged_entries_lie_between_what_was_merged(seed, dtype):
    prefill = synthetic_prefill(dim=8, context=60, seed=seed, dtype=dtype)
    run = pipeline("d2o", window=WINDOW).run(prefill, Budget.ratio(4))
    context = slice(prefill.spans.context_start, prefill.spans.context_end)
    slack = 1e-5 if dtype == torch.float32 else 2e-2
    for layer, packed in enumerate(run.cache.layers):
        for g in range(prefill.kv_heads):
            for rows, source in ((0, prefill.keys), (1, prefill.values)):
                whole, got = source[layer][g, context].float(), packed.head(g)[rows].float()
                inside = (packed.head(g)[2] >= context.start) & (packed.head(g)[2] < context.stop)
                assert bool((got[inside] <= whole.amax(0) + slack).all())
                assert bool((got[inside] >= whole.amin(0) - slack).all())


@pytest.mark.parametrize("quota", ["per_head", "density"])
def test_it_keeps_what_the_base_keeps(quota):
    prefill = synthetic_prefill(context=150, layers=3, seed=3, dtype=torch.bfloat16)
    base, merged = (
        pipeline(pack, quota=quota, window=WINDOW).run(prefill, Budget.ratio(4)).cache.layers
        for pack in ("evict", "d2o")
    )
    changed = 0
    for a, d in zip(base, merged, strict=True):
        for name in ("positions", "log_multiplicity", "offsets"):
            assert torch.equal(getattr(a, name), getattr(d, name))
        outside = (a.positions < 4) | (a.positions >= 154)
        assert torch.equal(a.values[outside], d.values[outside])
        assert torch.equal(a.keys[outside], d.keys[outside])
        # Keys and values change in the same entries.
        moved = (a.values != d.values).any(dim=1)
        assert torch.equal(moved, (a.keys != d.keys).any(dim=1))
        changed += int(moved.sum())
    assert changed > 20


@pytest.mark.parametrize("block", [1, 2, 7, 1000])
def test_blocks_change_nothing(block):
    rng = torch.Generator().manual_seed(0)
    keys, kept = torch.randn(3, 50, 8, generator=rng), torch.rand(3, 50, generator=rng) < 0.3
    for got, want in zip(
        best_matches(keys, kept, block=block), best_matches(keys, kept), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_ties_go_to_the_earlier_token_and_empty_heads_match_nothing():
    keys = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 1.0]]).expand(3, 4, 2)
    kept = torch.tensor([[False, True, True, True], [False] * 4, [True] * 4])
    source, target, similarity = best_matches(keys, kept)
    assert source.tolist() == [0]
    assert target.tolist() == [0]
    torch.testing.assert_close(similarity, torch.tensor([1.0]))
    for nothing in (kept[1:2], kept[2:3]):
        assert all(len(x) == 0 for x in best_matches(keys[:1], nothing))


def test_weights_by_hand():
    rows = torch.tensor([[4.0], [10.0], [1.0]])
    got = float(d2o_merge(rows, 0, [(1, 0.5), (2, 1.0)]))
    want = (4 * math.e + 10 * math.e**0.5 + math.e) / (2 * math.e + math.e**0.5)
    assert got == pytest.approx(want)
    assert float(d2o_merge(rows, 2, [])) == 1.0
