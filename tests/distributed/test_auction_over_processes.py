"""The paper's floor and auction over heads in several processes buy what one process buys."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.allocate import Frontier, Greedy, Singleton
from gracekv.allocate.plan import BudgetPlan
from gracekv.testing.forests import random_forest
from gracekv.tree import Forest
from support.thread_exchange import in_threads


def part(forest, shard):
    """The trees of this process's heads; and which nodes and trees of `forest` they are."""
    heads, slots = forest.heads // shard.ranks, forest.slots
    unit = torch.arange(forest.trees) // slots
    trees = unit % forest.heads // heads == shard.rank
    nodes = trees[forest.tree]
    number = torch.cat([nodes.cumsum(0) - 1, torch.tensor([-1])])
    tree = trees.cumsum(0) - 1
    kept = {
        name: getattr(forest, name)[nodes]
        for name in (
            "start", "end", "child_count", "level", "relevance", "distortion", "entries",
            "split_gain",
        )
    }  # fmt: skip
    own = dataclasses.replace(
        forest,
        heads=heads,
        shard=shard,
        tree=tree[forest.tree[nodes]],
        parent=number[forest.parent[nodes]],
        first_child=number[forest.first_child[nodes]],
        drop=forest.drop[trees],
        add_gain=forest.add_gain[trees],
        **kept,
    )
    return own, nodes, trees


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.booleans(), st.booleans(),
    st.sampled_from(["normal", "heavy", "ties", "zeros"]), st.floats(0, 1),
)  # fmt: skip
@settings(max_examples=80)
def test_floor_and_auction(seed, ranks, capped, elastic, gains, share):
    rng = torch.Generator().manual_seed(seed)
    forest = random_forest(seed, layers=2, heads=4, gains=gains)
    tokens = int(forest.end.max() - forest.start.min())
    plan = BudgetPlan(2, 4, tokens, max(1, round(share * 8 * tokens)), 0)
    quota = torch.randint(0, tokens + 1, (2, 4), generator=rng) if capped else None
    scores = torch.rand(2, 4, tokens, generator=rng)
    if gains == "ties":
        scores = (scores * 4).round() / 4
    candidates = torch.where(
        torch.rand(scores.shape, generator=rng) < 0.3, scores.double(), -torch.inf
    )
    floor, greedy = Singleton(), Greedy(elastic=elastic)
    start = floor.realize(forest, candidates, plan, quota)
    whole = greedy(start, quota)

    def one(shard):
        own, nodes, trees = part(forest, shard)
        caps = None if quota is None else shard.own_heads(quota, 1)
        begun = floor.realize(own, shard.own_heads(candidates, 1), plan, caps)
        return begun, greedy(begun, caps), nodes, trees

    for begun, bought, nodes, trees in in_threads(ranks, one):
        for mine, other in ((begun, start), (bought, whole)):
            assert torch.equal(mine.added, other.added[trees])
            assert torch.equal(mine.split, other.split[nodes])


def roots(entries, lengths):
    """Trees of one node each, of equal unit utility.

    `entries` int64 [L, G, J] are those of the nodes, `lengths` their tokens in each of J slots.
    """
    layers, heads, slots = entries.shape
    trees = entries.numel()
    nothing, ends = torch.zeros(trees, dtype=torch.int64), torch.tensor(lengths).cumsum(0)
    end = ends.repeat(layers * heads)
    numbers = torch.zeros(trees, dtype=torch.float64)
    return Forest(
        layers=layers,
        heads=heads,
        slots=slots,
        start=end - torch.tensor(lengths).repeat(layers * heads),
        end=end,
        parent=nothing - 1,
        first_child=nothing - 1,
        child_count=nothing,
        tree=torch.arange(trees),
        level=nothing,
        relevance=numbers,
        distortion=numbers,
        drop=numbers,
        entries=entries.flatten(),
        add_gain=entries.flatten().double(),
        split_gain=numbers,
    )


# Process 0 has heads 0 and 1. What the budget of 2 can pay for there is in layer 1 only, after all
# of process 1's layer 0.


def test_equal_offers_of_the_auction_go_to_the_earlier_layer():
    forest = roots(torch.tensor([[3, 3, 1, 1], [1, 1, 1, 1]])[..., None], [3])
    whole = Greedy()(Frontier.empty(forest, 2), None)
    assert whole.added.nonzero().flatten().tolist() == [2, 3]

    def one(shard):
        own, _, trees = part(forest, shard)
        return Greedy()(Frontier.empty(own, 2), None).added, whole.added[trees]

    for got, want in in_threads(2, one):
        assert torch.equal(got, want)


def test_equal_offers_of_the_floor_go_to_the_earlier_layer():
    forest = roots(torch.tensor([3, 1]).repeat(2, 4, 1), [3, 1])
    candidates = torch.full((2, 4, 4), -torch.inf).double()
    candidates[0, 0, 0] = candidates[0, 2:, 3] = candidates[1, :, 3] = 0.5
    plan, floor = BudgetPlan(2, 4, 4, 2, 0), Singleton(alpha=1.0, head_cap=12.0)
    whole = floor.realize(forest, candidates, plan, None)
    assert whole.added.nonzero().flatten().tolist() == [5, 7]

    def one(shard):
        own, _, trees = part(forest, shard)
        return floor.realize(own, shard.own_heads(candidates, 1), plan, None), trees

    for got, trees in in_threads(2, one):
        assert torch.equal(got.added, whole.added[trees])


@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 4]))
@settings(max_examples=15)
def test_floor_candidates_where_values_are_exact(seed, ranks):
    # Sixteenths add up without rounding, in any order.
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 5, (2, 4, 40), generator=rng) / 16
    plan = BudgetPlan(2, 4, 40, 60, 0)
    whole = Singleton().candidates(scores, plan)
    parts = in_threads(
        ranks, lambda shard: Singleton().candidates(shard.own_heads(scores, 1), plan, shard)
    )
    assert torch.equal(torch.cat(parts, dim=1), whole)
