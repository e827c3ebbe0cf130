import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.allocate import (
    ALLOCATORS,
    BudgetPlan,
    ExactDP,
    Frontier,
    Greedy,
    Lagrangian,
    Singleton,
    upper_bound,
)
from gracekv.allocate.operations import Operations
from gracekv.allocate.reference import greedy_heap, integer_program
from gracekv.errors import BudgetError, ConfigError, NonFiniteError, ShapeError
from gracekv.testing.contracts import check_allocator
from gracekv.testing.selections import check_frontier, random_forest
from support.covering import LONG
from support.draws import SEEDS, bools, floats, ints, some

GAINS = ("normal", "heavy", "ties", "zeros")


@st.composite
def auctions(draw, slots=5, slot_tokens=20):
    """A start (often with a floor) and a quota (often none)."""
    seed = draw(SEEDS)
    forest = random_forest(
        seed, layers=draw(ints(1, 2)), heads=draw(ints(1, 3)), slots=draw(ints(1, slots)),
        slot_tokens=draw(ints(1, slot_tokens)), gains=draw(some(GAINS)),
        explode=draw(some([0.0, 0.1, 0.4])), prune=draw(some([0.0, 0.2])),
        whole=draw(some([0.0, 0.4])),
    )  # fmt: skip
    count = int(forest.end.max() - forest.start.min())
    budget = draw(ints(0, int(Operations.of(forest).cost.sum()) + 1))
    quota = None
    rng = torch.Generator().manual_seed(seed)
    if draw(bools()):
        widest = draw(ints(0, 3)) * budget // (forest.layers * forest.heads) + 2
        quota = torch.randint(0, widest, (forest.layers, forest.heads), generator=rng)
    start = Frontier.empty(forest, budget)
    if draw(bools()):
        scores = torch.rand(forest.layers, forest.heads, count, generator=rng).double()
        scores[torch.rand(scores.shape, generator=rng) < 0.7] = -torch.inf
        plan = BudgetPlan(forest.layers, forest.heads, count, budget, recent=0)
        start = Singleton().realize(forest, scores, plan, quota)
    return start, quota


@settings(max_examples=1500 if LONG else 200)
@given(case=auctions(), elastic=bools())
def test_greedy_buys_what_the_heap_buys(case, elastic):
    start, quota = case
    fast = Greedy(elastic=elastic)(start, quota)
    slow = greedy_heap(start, quota, elastic=elastic)
    assert torch.equal(fast.added, slow.added)
    assert torch.equal(fast.split, slow.split)


@pytest.mark.parametrize("name", list(ALLOCATORS))
@given(case=auctions(slots=3, slot_tokens=10), elastic=bools())
def test_contract_of_every_allocator(name, case, elastic):
    start, quota = case
    allocator = ALLOCATORS.build(name, elastic=elastic)
    check_allocator(allocator, start, quota)
    result = allocator(start, quota)
    if elastic:
        assert (start.forest.add_gain[result.added & ~start.added] > 0).all()
        assert (start.forest.split_gain[result.split & ~start.split] > 0).all()


@given(case=auctions(slots=2, slot_tokens=9), elastic=bools())
def test_heuristics_below_exact_below_bound(case, elastic):
    start, quota = case
    exact = ExactDP(elastic=elastic)(start, quota).utility
    priced = Lagrangian(elastic=elastic)(start, quota)
    slack = 1e-9 * (1 + exact)
    # HiGHS closes the gap to its own feasibility tolerances, not to the last bit.
    assert abs(integer_program(start, quota, elastic=elastic).utility - exact) <= 1e-6 * (1 + exact)
    assert Greedy(elastic=elastic)(start, quota).utility <= priced.utility + slack
    assert priced.utility <= exact + slack
    assert exact <= upper_bound(start, quota, elastic=elastic) + slack
    assert exact <= priced.bound + slack
    assert upper_bound(start, quota, elastic=True) <= upper_bound(start, quota) + slack


@given(seed=SEEDS, share=floats(0.05, 0.95), caps=bools(), gains=some(["normal", "ties", "zeros"]))
def test_bound_is_tight_in_a_large_forest(seed, share, caps, gains):
    forest = random_forest(seed, layers=2, heads=2, slots=150, slot_tokens=12, gains=gains)
    start = Frontier.empty(forest, int(share * int(Operations.of(forest).cost.sum())))
    result = Lagrangian()(start, torch.full((2, 2), start.budget // 5) if caps else None)
    # The gap is less than the best tree's gain, once for the budget and once for each quota.
    ops = Operations.of(forest)
    per_tree = torch.zeros(forest.trees, dtype=torch.float64).index_add_(0, ops.tree, ops.gain)
    assert result.bound - result.utility <= (5 if caps else 1) * float(per_tree.max()) + 1e-6
    if caps:
        assert result.bound <= upper_bound(start) * (1 + 1e-9)


@pytest.mark.parametrize("capped", [False, True])
def test_rounding_of_prices_buys_nothing_beyond_the_budget(capped):
    # Trees are kept or dropped whole. At the best one's price, its net gain is 0 up to rounding.
    forests = (
        random_forest(seed, layers=1, heads=1, slots=1, slot_tokens=70, explode=0.0, whole=1.0)
        for seed in range(1000)
    )
    forest = next(f for f in forests if int(f.entries[0]) in range(33, 64))
    cost = int(forest.entries[0])
    drawn = torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gains = [gain for gain in drawn.tolist() if gain - gain / cost * cost > 0]
    assert gains
    quota = torch.full((1, 1), cost - 1) if capped else None
    for gain in gains:
        one = dataclasses.replace(forest, add_gain=torch.tensor([gain], dtype=torch.float64))
        check_frontier(Lagrangian()(Frontier.empty(one, cost - 1), quota), quota)


def test_check_frontier_sees_broken_frontiers():
    forest = random_forest(4, slot_tokens=30, prune=0.0)
    good = Greedy()(Frontier.empty(forest, 40), None)
    check_frontier(good)
    inner = int((good.split[forest.trees :]).nonzero()[0]) + forest.trees
    orphan = good.split.clone()
    orphan[forest.parent[inner]] = False
    leaf = good.split.clone()
    leaf[forest.is_leaf.nonzero()[0]] = True
    for broken, reason in (
        (dataclasses.replace(good, split=orphan), "parent is not|never added"),
        (dataclasses.replace(good, split=leaf), "leaf"),
        (dataclasses.replace(good, added=torch.zeros_like(good.added)), "never added"),
        (dataclasses.replace(good, budget=good.spent - 1), "budget"),
        (dataclasses.replace(good, floor_spent=99), "floor_spent"),
        (dataclasses.replace(good, bound=good.utility / 2), "bound"),
    ):
        with pytest.raises(AssertionError, match=reason):
            check_frontier(broken)
    with pytest.raises(AssertionError, match="quotas"):
        check_frontier(good, good.entries_per_head() - 1)


def test_bad_starts_and_forests_are_refused():
    forest = random_forest(0)
    full = Greedy()(Frontier.empty(forest, 30), None)
    greedy = Greedy()
    with pytest.raises(BudgetError, match="more entries"):
        greedy(dataclasses.replace(full, budget=5), None)
    with pytest.raises(BudgetError, match="quota"):
        greedy(full, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="quota"):
        greedy(full, torch.zeros(5, dtype=torch.int64))
    nan = dataclasses.replace(forest, add_gain=forest.add_gain * torch.nan)
    with pytest.raises(NonFiniteError, match="NaN"):
        greedy(Frontier.empty(nan, 30), None)
    free = dataclasses.replace(forest, entries=torch.zeros_like(forest.entries))
    with pytest.raises(ShapeError, match="at least one entry"):
        greedy(Frontier.empty(free, 30), None)


def test_the_exact_allocator_refuses_large_forests():
    with pytest.raises(ConfigError, match="max_cells"):
        ExactDP(max_cells=5)(Frontier.empty(random_forest(0), 30), None)
