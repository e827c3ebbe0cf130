"""Widths by one price per bit in each head, as by the reference and RDKV's own solver."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from gracekv.allocate import Budget
from gracekv.errors import ConfigError, ShapeError
from gracekv.pipeline import Pipeline
from gracekv.precision import RateDistortion, reference
from gracekv.precision.width_auction import Entries, WidthCosts, widths_by_head
from gracekv.prefill import PromptSpans
from gracekv.testing import synthetic_prefill
from gracekv.testing.selections import check_run
from support.draws import SEEDS, bools, ints, lists, some

HEADS = 3
EPSILON = (0.25, 0.011, 0.000057, 0.0)


def entries_of(worth, lengths, loss):
    head = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    table = torch.tensor(loss, dtype=torch.float64).expand(len(lengths), -1)
    return Entries(worth, head, table, torch.zeros(len(worth), dtype=torch.bool))


@settings(max_examples=60)
@given(
    seed=SEEDS,
    lengths=lists(ints(0, 9), min_size=HEADS, max_size=HEADS),
    ties=bools(),
    drawn=bools(),
    block=some([(0, 0, 0, 0), (7, 7, 7, 0), (40, 40, 40, 0)]),
    per_block=some([1, 2, 4]),
    budget=ints(0, 200),
)
def test_gives_what_the_reference_gives(seed, lengths, ties, drawn, block, per_block, budget):
    rng = torch.Generator().manual_seed(seed)
    worth = torch.rand(sum(lengths), generator=rng).double()
    if ties:
        worth = (3 * worth).round()
    loss = EPSILON
    if drawn:
        loss = (*torch.rand(3, generator=rng).double().sort(descending=True).values.tolist(), 0.0)
    entries = entries_of(worth, lengths, loss)
    costs = WidthCosts((2, 4, 8, 16), (3, 5, 9, 16), block, per_block)

    level = widths_by_head(entries, costs, budget)

    assert level.tolist() == reference.widths_at_a_price(entries, costs, budget)
    for head in range(HEADS):
        own = level[entries.head == head].tolist()
        assert reference._bytes(own, [0] * len(own), costs) <= budget


def bisected(scores, mean_bits):
    """RDKV's solver in plain loops: bits by the lowest price whose mean bits are not above."""
    bits, epsilon = (0, 2, 4, 8, 16), (1.0, *EPSILON)

    def chosen(price):
        costs = [[s * e + price * b for e, b in zip(epsilon, bits, strict=True)] for s in scores]
        return [bits[own.index(min(own))] for own in costs]

    low, high = 0.0, max(scores)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(chosen(middle)) > mean_bits * len(scores):
            low = middle
        else:
            high = middle
    return chosen(high)


@settings(max_examples=40)
@given(
    seed=SEEDS,
    count=ints(1, 60),
    spread=some([0.1, 1.5, 4.0]),
    mean=some([0.3, 1.0, 2.0, 5.0, 9.0, 16.0]),
)
def test_gives_what_the_published_solver_gives(seed, count, spread, mean):
    rng = torch.Generator().manual_seed(seed)
    scores = (spread * torch.randn(2 * count, generator=rng).double()).exp()
    entries = entries_of(scores, [count, count], EPSILON)
    widths = (2, 4, 8, 16)

    level = widths_by_head(entries, WidthCosts(widths, widths, (0, 0, 0, 0), 1), int(mean * count))

    bits = torch.tensor((0, *widths))[level].tolist()
    for head in (slice(0, count), slice(count, None)):
        assert bits[head] == bisected(scores[head].tolist(), int(mean * count) / count)


@pytest.mark.parametrize(("ratio", "narrowest"), [(1.5, 8), (4, 2), (16, 2)])
def test_every_head_spends_the_same_bytes(ratio, narrowest):
    prefill = synthetic_prefill(context=400, dim=32, dtype=torch.bfloat16, seed=1)
    run = Pipeline.named("rdkv").run(prefill, Budget.ratio(ratio))
    check_run(run, prefill)
    kept = run.accounting
    share = kept.budget_bytes // (prefill.layers * prefill.kv_heads)
    spent = torch.zeros(prefill.layers, prefill.kv_heads, dtype=torch.int64)
    for number, layer in enumerate(run.cache.layers):
        for head in range(layer.heads):
            at = layer.exact.offsets[head : head + 2]
            own = layer.exact.positions[at[0] : at[1]]
            inside = (own >= prefill.spans.context_start) & (own < prefill.spans.context_end)
            spent[number, head] = int(inside.sum()) * 2 * 32 * 2
            spent[number, head] += sum(x.rows(head, head + 1).kv_bytes for x in layer.coded)
    assert int(spent.sum()) == kept.spent_bytes
    # The next step is a wider entry and at most a block's scales.
    assert bool(((share - 32 * 2 * 2 - 4 * 32 - 4 < spent) & (spent <= share)).all())
    assert min(share.bits for share in kept.widths) == narrowest


def test_a_budget_in_entries_leaves_them_as_they_are():
    prefill = synthetic_prefill(context=100, dim=32)
    kept = Pipeline.named("rdkv").run(prefill, Budget.entries_per_head(20)).accounting
    assert (kept.spent, [share.bits for share in kept.widths]) == (80, [32])


@pytest.mark.parametrize(
    ("bad", "message"),
    [((0.25, 0.011), "takes 3 items; got"), ((0.25, 0.011, 1.5), "takes a number > 0 and < 1")],
)
def test_bad_distortions_are_refused(bad, message):
    with pytest.raises(ConfigError, match=f"RateDistortion.distortion {message}"):
        RateDistortion(distortion=bad)


def test_heads_whose_codes_do_not_fill_bytes_are_refused():
    with pytest.raises(ShapeError, match="6 codes of 2 bits do not fill whole bytes"):
        RateDistortion().entry_bytes(6, 2, PromptSpans(4, 24, 30, 32))
    with pytest.raises(ConfigError, match="keep_all has no budget to allocate bits by"):
        dataclasses.replace(Pipeline.named("rdkv"), keep_all=True)
