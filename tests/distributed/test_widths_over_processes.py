"""Processes with some heads each buy the same bytes and bits as one that holds all heads."""

import dataclasses

import pytest
import torch
from hypothesis import given

from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.allocate.plan import BudgetPlan
from gracekv.allocate.ranking import affordable, first_offer
from gracekv.allocate.selection import Selection
from gracekv.allocate.top_tokens import top_tokens
from gracekv.distributed.sharding import WHOLE
from gracekv.pipeline.comparison import AuctionResult, within_bytes
from gracekv.precision.width_auction import Entries, WidthCosts, allocated_widths
from support.draws import SEEDS, floats, ints, some
from support.thread_exchange import in_threads

LAYERS, HEADS = 2, 4


def entries_of(seed, kind):
    """Up to twelve entries per head, some fixed, and the costs of their widths."""
    rng = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 13, (LAYERS * HEADS,), generator=rng)
    head = torch.arange(LAYERS * HEADS).repeat_interleave(counts)
    worth = torch.rand(len(head), generator=rng, dtype=torch.float64)
    if kind == "ties":
        worth = (worth * 3).round() / 3
    loss = torch.rand(LAYERS * HEADS, 3, generator=rng, dtype=torch.float64)
    loss = loss.sort(dim=1, descending=True).values * torch.tensor([1.0, 1.0, 0.0])
    if kind == "ties":
        loss = loss[:1].expand_as(loss)
    fixed = torch.rand(len(head), generator=rng) < 0.1
    # A block of the narrowest width costs more than an entry, so widening one may free bytes.
    costs = WidthCosts((4, 8, 16), (5, 9, 16), (13, 13, 0), per_block=4)
    return Entries(worth, head, loss, fixed), costs


@given(SEEDS, some([1, 2, 4]), some(["random", "ties"]), floats(0, 1.1))
def test_allocated_widths(seed, ranks, kind, share):
    entries, costs = entries_of(seed, kind)
    budget = round(share * 16 * len(entries.head))
    whole = allocated_widths(entries, costs, budget)
    within = (entries.head[:, None] == entries.head).tril(-1).sum(1)

    def one(shard):
        own = entries.head % HEADS // (HEADS // shard.ranks) == shard.rank
        layer, head = entries.head[own] // HEADS, entries.head[own] % HEADS
        heads = HEADS // shard.ranks
        unit = layer * heads + head - shard.rank * heads
        part = dataclasses.replace(
            entries, worth=entries.worth[own], head=unit,
            loss=shard.own_heads(entries.loss.view(LAYERS, HEADS, -1), 1).flatten(0, 1),
            fixed=entries.fixed[own], place=shard.among_all(unit, heads) * 13 + within[own],
        )  # fmt: skip
        return own, allocated_widths(part, costs, budget, shard)

    for own, level in in_threads(ranks, one):
        assert level.tolist() == whole[own].tolist()


@given(SEEDS, some([2, 3]))
def test_affordable_against_its_definition(seed, ranks):
    rng = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 20, (), generator=rng))
    keys = torch.randint(0, 4, (ranks, count), generator=rng).double() / 3
    ties = torch.randperm(ranks * count, generator=rng).view(ranks, count)
    costs = torch.randint(-3, 6, (ranks, count), generator=rng)
    limit = int(torch.randint(0, 20, (), generator=rng))
    order = sorted((-float(k), int(t), r) for r in range(ranks) for k, t in zip(keys[r], ties[r]))  # noqa: B905
    price = {int(t): int(c) for t, c in zip(ties.flatten(), costs.flatten(), strict=True)}
    taken, left = [0] * ranks, limit
    for _, tie, rank in order:
        if price[tie] > left:
            break
        taken[rank], left = taken[rank] + 1, left - price[tie]

    def one(shard):
        own = sorted((-float(k), int(t)) for k, t in zip(keys[shard.rank], ties[shard.rank]))  # noqa: B905
        tie = torch.tensor([t for _, t in own])
        key = torch.tensor([-k for k, _ in own], dtype=torch.float64)
        return affordable(key, tie, torch.tensor([price[t] for _, t in own]), limit, shard)

    assert in_threads(ranks, one) == [(count, left) for count in taken]


@pytest.mark.parametrize(("offers", "first"), [
    ([(0.5, 3, 7), (0.5, 1, 9), (0.25, 0, 2)], (1, 9)), ([(0.5, 1, 9), (0.5, 3, 7), None], (0, 9)),
    ([None, (0.0, 8, -4), None], (1, -4)), ([None, None, None], None),
])  # fmt: skip
def test_equal_offers_go_to_the_earlier(offers, first):
    assert in_threads(3, lambda shard: first_offer(offers[shard.rank], shard)) == [first] * 3


@given(SEEDS, some([2, 4]), ints(0, 3))
def test_entries_within_bytes(seed, ranks, sinks):
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(LAYERS, HEADS, 20, generator=rng)
    costs = EntryBytes(exact=16, coded=5, block=13, per_block=4, full=16, sinks=sinks)
    limit = int(torch.randint(8 * 16, 8 * 16 * 20, (), generator=rng))
    plan = BudgetPlan(LAYERS, HEADS, 21, LAYERS * HEADS * 21, 1, limit)

    def chosen(part, shard):
        omega = torch.ones(part.shape[:2])

        def choose(plan):
            kept = top_tokens(part, omega, plan.base, None, shard=shard)
            return AuctionResult(plan, Selection.of_tokens(kept, 3), 0.0)

        return within_bytes(plan, costs, choose, shard)

    want = chosen(scores, WHOLE)
    parts = in_threads(ranks, lambda shard: chosen(shard.own_heads(scores, 1), shard))
    counts = [part.selection.per_head() for part in parts]
    assert torch.equal(torch.cat(counts, dim=1), want.selection.per_head())
    assert [part.plan for part in parts] == [want.plan] * ranks
