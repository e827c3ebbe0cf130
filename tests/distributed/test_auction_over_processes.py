"""The paper's floor and auction buy the same over heads in several processes as in one."""

import dataclasses

import torch
from hypothesis import given

from gracekv.allocate import Greedy, Singleton
from gracekv.allocate.plan import BudgetPlan
from gracekv.testing.selections import random_forest
from support.draws import SEEDS, bools, floats, some
from support.thread_exchange import in_threads


def part(forest, shard):
    """The trees of this process's heads, and their nodes' and trees' indices in `forest`."""
    heads, slots = forest.heads // shard.ranks, forest.slots
    trees = torch.arange(forest.trees) // slots % forest.heads // heads == shard.rank
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
        forest, heads=heads, shard=shard, tree=tree[forest.tree[nodes]],
        parent=number[forest.parent[nodes]], first_child=number[forest.first_child[nodes]],
        drop=forest.drop[trees], add_gain=forest.add_gain[trees], **kept,
    )  # fmt: skip
    return own, nodes, trees


@given(
    SEEDS, some([1, 2, 4]), bools(), bools(), some(["normal", "heavy", "ties", "zeros"]),
    floats(0, 1),
)  # fmt: skip
def test_floor_and_auction(seed, ranks, capped, elastic, gains, share):
    rng = torch.Generator().manual_seed(seed)
    forest = random_forest(seed, layers=2, heads=4, gains=gains)
    tokens = int(forest.end.max() - forest.start.min())
    plan = BudgetPlan(2, 4, tokens, max(1, round(share * 8 * tokens)), 0)
    quota = torch.randint(0, tokens + 1, (2, 4), generator=rng) if capped else None
    scores = torch.rand(2, 4, tokens, generator=rng)
    if gains == "ties":
        scores = (scores * 4).round() / 4
    chosen = torch.rand(scores.shape, generator=rng) < 0.3
    candidates = torch.where(chosen, scores.double(), -torch.inf)
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


@given(SEEDS, some([2, 4]))
def test_floor_candidates_where_values_are_exact(seed, ranks):
    # Sixteenths add up without rounding, in any order.
    scores = torch.randint(0, 5, (2, 4, 40), generator=torch.Generator().manual_seed(seed)) / 16
    plan = BudgetPlan(2, 4, 40, 60, 0)
    parts = in_threads(ranks, lambda x: Singleton().candidates(x.own_heads(scores, 1), plan, x))
    assert torch.equal(torch.cat(parts, dim=1), Singleton().candidates(scores, plan))
