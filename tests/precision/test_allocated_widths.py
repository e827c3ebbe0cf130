"""Widths by marginal gain per byte: those of the reference, ties included, within the budget."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.allocate import Budget, Selection
from gracekv.allocate.top_tokens import entry_gains
from gracekv.errors import BudgetError, ConfigError, NonFiniteError
from gracekv.pipeline import Pipeline
from gracekv.precision import AllocatedPrecision, reference
from gracekv.precision.allocated import rounding_loss, samples
from gracekv.precision.width_auction import Entries, WidthCosts, allocated_widths, rates
from gracekv.testing import synthetic_prefill
from gracekv.testing.selections import check_run

HEADS = 3


@st.composite
def auctions(draw):
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    lengths = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=HEADS, max_size=HEADS)))
    count = int(lengths.sum())
    worth = torch.rand(count, generator=rng).double()
    if draw(st.booleans()):
        worth = (3 * worth).round()  # Ties, and worthless entries.
    loss = torch.rand(HEADS, 3, generator=rng).double().sort(dim=1, descending=True).values
    loss[:, 2] = 0
    if draw(st.booleans()):
        loss = loss[:, torch.tensor([1, 0, 2])]  # More bytes, more loss.
    exact = torch.rand(count, generator=rng) < draw(st.sampled_from([0.0, 0.3]))
    entries = Entries(worth, torch.arange(HEADS).repeat_interleave(lengths), loss, exact)
    block = draw(st.sampled_from([(0, 0, 0), (7, 7, 0), (40, 40, 0), (9, 5, 3)]))
    costs = WidthCosts((4, 8, 16), (5, 9, 16), block, draw(st.sampled_from([1, 2, 4])))
    return entries, costs, draw(st.integers(0, count * 20 + 60))


@settings(max_examples=60)
@given(auctions())
def test_buys_what_the_reference_buys(auction):
    entries, costs, budget = auction
    level = allocated_widths(entries, costs, budget)
    assert level.tolist() == reference.allocated_widths(entries, costs, budget)


def test_rates_never_rise_and_merge_steps_that_gain_more_together():
    # The second head's first two steps gain more per byte together, the third's all three.
    costs = WidthCosts((4, 8, 16), (5, 9, 16), (0, 0, 0), 8)
    loss = [[0.2, 0.01, 0.0], [0.9, 0.1, 0.0], [1.0, 1.0, 0.0]]
    slopes = rates(torch.tensor(loss, dtype=torch.float64), costs)
    want = [[0.8 / 5, 0.19 / 4, 0.01 / 7], [0.9 / 9, 0.9 / 9, 0.1 / 7], [1 / 16] * 3]
    torch.testing.assert_close(slopes, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=0)


def test_the_loss_is_that_of_rounding_a_sample():
    prefill = synthetic_prefill(context=90, dim=16, layers=2, kv_heads=2, group=2, seed=3)
    region = prefill.spans.region(4)
    codings = AllocatedPrecision(group=8).codings
    sampled = [samples(capture, region, 8) for capture in prefill]
    got = torch.cat([rounding_loss(*own, codings) for own in sampled])
    # A GPU quantises all layers at once.
    together = rounding_loss(*map(torch.cat, zip(*sampled, strict=True)), codings)
    torch.testing.assert_close(together, got)
    asking = list(prefill.spans.last(16))
    for unit in range(4):
        layer, head = divmod(unit, 2)
        rows = (x[layer][head] for x in (prefill.keys, prefill.values))
        keys, values = (x[region.start : region.end] for x in rows)
        queries = prefill.queries_at(layer, asking)[2 * head : 2 * head + 2].double()
        count = torch.tensor([len(keys)])
        spread = (values.double() - values.double().mean(dim=0)).square().sum()
        for number, coding in enumerate(codings):
            off_k = reference.rounded(keys, count, coding, "keys")[0] - keys.double()
            off_v = reference.rounded(values, count, coding, "values")[0] - values.double()
            noise = (prefill.scale * queries @ off_k.T).square().mean()
            want = (noise + off_v.square().sum() / spread).sqrt()
            torch.testing.assert_close(got[unit, number], want, rtol=1e-3, atol=1e-6)
    assert bool((got[:, 0] < 0.3 * got[:, 1]).all())


@pytest.mark.parametrize("ratio", [1.2, 2, 3, 8])
def test_bits_go_to_what_is_worth_more(ratio):
    prefill = synthetic_prefill(context=200, dim=32, dtype=torch.bfloat16, seed=1)
    plus = Pipeline.named("gracekv-plus")
    run, exact = (
        dataclasses.replace(plus, precision=x).run(prefill, Budget.ratio(ratio))
        for x in (AllocatedPrecision(sinks=0), AllocatedPrecision(sinks=0, rounding=30.0))
    )
    check_run(run, prefill)
    assert (exact.accounting.spent < run.accounting.spent) == (ratio > 1.2)
    kept = run.accounting
    assert 0 <= kept.budget_bytes - kept.spent_bytes < 2 * 32 * 2
    assert len(kept.widths) > 1
    worth = run.relevance.scores.double() * run.relevance.sensitivity.double()[..., None]
    for number, layer in enumerate(run.cache.layers):
        for head in range(layer.heads):
            # All entries of a head lose alike, so a wider one is never worth less.
            least = torch.inf
            for part in layer.coded:
                at = part.positions[int(part.offsets[head]) : int(part.offsets[head + 1])]
                mine = worth[number, head][at.long() - run.partition.region.start]
                assert not len(mine) or float(mine.max()) <= least
                least = min(least, float(mine.min()) if len(mine) else least)


def test_merged_entries_are_worth_what_their_tokens_are():
    prefill = synthetic_prefill(context=150, dim=16, dtype=torch.bfloat16, seed=2)
    fields = {"precision": {"name": "allocated", "group": 8}, "window": {"size": 4}}
    run = Pipeline.from_dict(fields).run(prefill, Budget.ratio(6))
    check_run(run, prefill)
    assert run.accounting.spent_bytes <= run.accounting.budget_bytes
    chosen, scores = run.selection, run.relevance.scores.double().flatten(0, 1)
    assert bool((chosen.end - chosen.start > 1).any())
    omega = run.relevance.sensitivity.double().flatten()
    origin = chosen.region[0]
    columns = (x.tolist() for x in (chosen.head_of_entry(), chosen.start, chosen.end))
    spans = zip(*columns, strict=True)
    want = [omega[head] * scores[head, a - origin : b - origin].sum() for head, a, b in spans]
    got = entry_gains(run.relevance.scores, run.relevance.sensitivity, chosen)
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_cannot_be_rounded_are_refused(bad):
    prefill = synthetic_prefill(context=60, dim=8, layers=2)
    prefill.keys[1][:, 8:50, 3] = bad
    region, precision = prefill.spans.region(4), AllocatedPrecision(group=8)
    measured = [precision.measured(capture, region) for capture in prefill]
    kept = torch.ones(2, prefill.kv_heads, region.length, dtype=torch.bool)
    offered = Selection.of_tokens(kept, region.start)
    with pytest.raises(NonFiniteError, match="Use precision 'full'"):
        precision.allocate(prefill.info, measured, offered, torch.ones(offered.entries), 1000)


def test_values_that_are_all_alike_lose_nothing_but_by_their_keys():
    prefill = synthetic_prefill(context=60, dim=8, layers=1)
    prefill.keys[0].fill_(1.5)
    prefill.values[0].fill_(-0.75)
    sampled = samples(prefill.layer(0), prefill.spans.region(4), 8)
    loss = rounding_loss(*sampled, AllocatedPrecision(group=8).codings)
    assert torch.equal(loss, torch.zeros_like(loss))
    prefill.values[0][:] = 64 * torch.tensor([-8.0, -5, -3, 0, 1, 2, 6, 8])  # of every token
    sampled = samples(prefill.layer(0), prefill.spans.region(4), 8)
    assert rounding_loss(*sampled, AllocatedPrecision(group=8).codings).isfinite().all()


def test_entries_of_a_width_without_a_coding_are_refused(monkeypatch):
    pipeline = Pipeline.from_dict({"precision": "uniform"}, base="snapkv")
    uniform = type(pipeline.precision)
    monkeypatch.setattr(uniform, "widths", lambda _, start, region: (start % 4).byte())
    with pytest.raises(ConfigError, match=r"gives widths \[0, 1, 2, 3\]; its codings have \[8\]"):
        pipeline.run(synthetic_prefill(context=60, dim=32), Budget.ratio(2))


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="keep_all has no budget to allocate bits by"):
        Pipeline.from_dict({"precision": "allocated"}, base="fullkv")
    prefill = synthetic_prefill(context=60, dim=8, dtype=torch.bfloat16)
    pipeline = Pipeline.from_dict({"precision": "allocated"}, base="gracekv-plus")
    with pytest.raises(BudgetError, match="is below the smallest that works here, 512"):
        pipeline.run(prefill, Budget.kv_bytes(511))
    # Only the recent window fits, then one entry of 4 bits: 8 + 4 bytes and a block of 32.
    for size, spent in ((512, 16), (555, 16), (556, 17)):
        assert pipeline.run(prefill, Budget.kv_bytes(size)).accounting.spent == spent
