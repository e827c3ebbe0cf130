"""The pool holds the entries that a top-k over all layers keeps."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from gracekv.allocate import Selection
from gracekv.allocate.top_tokens import NEVER, top_tokens
from gracekv.cache.pool import EntryPool
from gracekv.testing import synthetic_prefill
from support.draws import DTYPES, floats, ints, some


def filled(prefill, region, budget, gains, allowed):
    pool = EntryPool(prefill.info, region, budget)
    for capture in prefill:
        own = gains[capture.number].double()
        pool.add(capture, own.masked_fill(~allowed[capture.number], NEVER))
    return pool


@settings(max_examples=60)
@given(
    seed=ints(0, 2**16), levels=some([1, 3, 1000]), share=floats(0.0, 1.2),
    allowed=some([0.0, 0.5, 1.0]), sizes=some([(4, 5, 3), (0, 0, 0), (3, 0, 1)]), dtype=DTYPES,
)  # fmt: skip
def test_it_holds_what_a_top_k_keeps(seed, levels, share, allowed, sizes, dtype):
    around = dict(zip(("prefix", "question", "tail"), sizes, strict=True))
    prefill = synthetic_prefill(seed=seed, layers=3, context=40, dim=4, dtype=dtype, **around)
    region = prefill.spans.region(2)
    rng = torch.Generator().manual_seed(seed)
    shape = (3, prefill.kv_heads, region.length)
    gains = torch.randint(0, levels, shape, generator=rng).double()
    may = torch.rand(shape, generator=rng) < allowed
    budget = int(share * gains.numel())
    pool = filled(prefill, region, budget, gains, may)
    # Tokens that must not be kept have gain 0 and come last.
    kept = top_tokens(torch.where(may, gains + 1, 0.0), torch.ones(shape[:2]), budget, None) & may
    want, got = Selection.of_tokens(kept, region.start), pool.selection()
    assert torch.equal(got.offsets, want.offsets)
    assert torch.equal(got.start, want.start)
    assert got.region == want.region
    assert pool.utility() == float(gains[kept].sum())
    layouts = got.layouts(prefill.spans.length, prefill.keys)
    for capture, (packed, chosen), layout in zip(prefill, pool.pop(got), layouts, strict=True):
        assert torch.equal(packed.offsets, layout.offsets)
        assert torch.equal(packed.positions.long(), layout.start)
        assert torch.equal(chosen, layout.selected)
        assert torch.equal(packed.keys, capture.keys[layout.head, layout.start])
        assert torch.equal(packed.values, capture.values[layout.head, layout.start])


def test_fewer_entries_than_it_holds_can_be_taken():
    prefill = synthetic_prefill(seed=1, layers=2, context=30)
    region = prefill.spans.region(2)
    gains = torch.rand(2, prefill.kv_heads, region.length)
    pool = filled(prefill, region, 50, gains, torch.ones_like(gains, dtype=torch.bool))
    few = pool.selection().where(torch.arange(50) % 3 == 0)
    layouts = few.layouts(prefill.spans.length, prefill.keys)
    for (packed, chosen), layout in zip(pool.pop(few), layouts, strict=True):
        assert torch.equal(packed.positions.long(), layout.start)
        assert torch.equal(chosen, layout.selected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gains_that_are_not_finite_stay_in_bounds(bad):
    prefill = synthetic_prefill(seed=2, layers=2, context=30)
    region = prefill.spans.region(2)
    gains = torch.full((2, prefill.kv_heads, region.length), bad)
    pool = filled(prefill, region, 20, gains, torch.ones_like(gains, dtype=torch.bool))
    assert pool.selection().entries == 20


def test_layers_are_only_lent():
    prefill = synthetic_prefill(seed=3, layers=2, context=30)
    region = prefill.spans.region(2)
    gains = torch.rand(prefill.kv_heads, region.length).double()
    pool = EntryPool(prefill.info, region, 40)
    for capture in prefill:
        keys = capture.keys.clone()
        pool.add(dataclasses.replace(capture, keys=keys), gains)
        keys.fill_(torch.nan)
    assert all(bool(packed.keys.isfinite().all()) for packed, _ in pool.pop(pool.selection()))
