"""D2O's merging: against plain loops, by construction, and reduced to plain eviction."""

import pytest
import torch
from hypothesis import given

from gracekv import Budget
from gracekv.cache.d2o import best_matches
from gracekv.cache.reference import d2o_matches, d2o_merge, d2o_threshold
from gracekv.testing import synthetic_prefill
from support.draws import SEEDS, floats, ints, some
from support.selections import kept_positions
from support.token_pipelines import pipeline

WINDOW = {"size": 4, "minimum": 1}


@given(
    seed=SEEDS, length=ints(4, 60), prefix=ints(0, 4),
    quota=some(["per_head", "global", "density"]), ratio=floats(1.1, 4.0),
)  # fmt: skip
def test_equals_the_plain_loop(seed, length, prefix, quota, ratio):
    prefill = synthetic_prefill(dim=8, context=length, prefix=prefix, seed=seed)
    whole = pipeline("d2o", quota=quota, window={"size": 1, "minimum": 1})
    run = whole.run(prefill, Budget.ratio(ratio))
    start, end = prefill.spans.context_start, prefill.spans.context_end
    for layer, packed in enumerate(run.cache.layers):
        keys, values = prefill.keys[layer][:, start:end], prefill.values[layer][:, start:end]
        heads = range(prefill.kv_heads)
        kept = [(kept_positions(run, prefill, layer, g) - start).tolist() for g in heads]
        matches = [d2o_matches(keys[g], kept[g]) for g in heads]
        # A cosine within rounding of the threshold may fall on either side.
        least = d2o_threshold(matches) - 1e-7
        for g in heads:
            got_keys, got_values, positions, log_m = packed.head(g)
            want_keys = prefill.keys[layer][g].double().clone()
            want_values = prefill.values[layer][g].double().clone()
            for c in kept[g]:
                accepted = [(i, u) for i, (u, to) in matches[g].items() if to == c and u >= least]
                want_keys[start + c] = d2o_merge(keys[g], c, accepted)
                want_values[start + c] = d2o_merge(values[g], c, accepted)
            at = positions.long()
            torch.testing.assert_close(got_keys.double(), want_keys[at], rtol=2e-5, atol=2e-6)
            torch.testing.assert_close(got_values.double(), want_values[at], rtol=2e-5, atol=2e-6)
            assert not log_m.any()


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
    torch.testing.assert_close(*(best_matches(keys, kept, block=x) for x in (block, None)))


def test_ties_go_to_the_earlier_token_and_empty_heads_match_nothing():
    keys = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 1.0]]).expand(3, 4, 2)
    kept = torch.tensor([[False, True, True, True], [False] * 4, [True] * 4])
    source, target, similarity = best_matches(keys, kept)
    assert source.tolist() == [0]
    assert target.tolist() == [0]
    torch.testing.assert_close(similarity, torch.tensor([1.0]))
    for nothing in (kept[1:2], kept[2:3]):
        assert all(len(x) == 0 for x in best_matches(keys[:1], nothing))
