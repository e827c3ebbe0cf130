"""Pruned growth gives the greedy auction the same frontier."""

import dataclasses

import pytest
from hypothesis import given, settings

from gracekv.allocate import BudgetPlan, Frontier, Greedy, Singleton
from gracekv.allocate.reference import greedy_heap
from gracekv.tree import REFINERS, Prototype, TreeContext, build_forest
from support.covering import LONG
from support.draws import bools, ints, some
from support.trees import tree_context

# Other batch sizes round D differently, by at most 1e-5 of the utility.
UTILITY = 1e-5


def bought(frontier: Frontier) -> set[tuple[int, int, int]]:
    """(tree, start, end) of the kept nodes, comparable between forests of different depths."""
    forest, kept = frontier.forest, frontier.kept
    columns = (forest.tree[kept], forest.start[kept], forest.end[kept])
    return set(zip(*(column.tolist() for column in columns), strict=True))


def assert_same_purchase(got: Frontier, want: Frontier) -> None:
    """The same nodes; or as much utility for as many entries, with few nodes exchanged."""
    assert abs(got.utility - want.utility) <= UTILITY * abs(want.utility)
    exchanged = bought(got) ^ bought(want)
    if exchanged:
        assert got.spent == want.spent
        assert abs(got.utility - want.utility) <= UTILITY / 10 * abs(want.utility), exchanged
        assert len(exchanged) <= 8, f"more than a tie: {exchanged}"


def problem(seed: int, monkeypatch: pytest.MonkeyPatch) -> TreeContext:
    # One layer at a time, so that later layers are pruned by the results of earlier ones.
    monkeypatch.setattr("gracekv.tree.build._GROUP_BYTES", 1)
    return tree_context(seed, layers=5, context=50)


@pytest.mark.parametrize("refiner", ["binary_extract", "binary", "extract"])
@pytest.mark.parametrize("reference", [False, True])
@settings(max_examples=100 if LONG else 6)
@given(
    # At a small alpha, most candidates, at least one per head, are not realised.
    seed=ints(0, 10_000), budget=ints(1, 450), floor=bools(), elastic=bools(),
    alpha=some([0.05, 0.2, 0.6, 1.0]),
)  # fmt: skip
def test_pruned_forests_give_the_same_frontier(
    reference: bool, refiner: str, seed: int, budget: int, floor: bool, elastic: bool, alpha: float
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        context = problem(seed, monkeypatch)
        region = context.partition.region
        plan = BudgetPlan(layers=5, heads=2, context=region.length, total=budget, recent=0)
        keeper = Singleton(gamma=0.5, alpha=alpha)
        candidates = keeper.candidates(context.scores, plan) if floor else None
        context = dataclasses.replace(context, forced=candidates)
        forests = [
            build_forest(context, Prototype(), REFINERS.build(refiner), limit)
            for limit in (None, budget)
        ]
        results = [
            greedy_heap(start, None, elastic=elastic) if reference else Greedy(elastic)(start, None)
            for start in (keeper.realize(forest, candidates, plan, None) for forest in forests)
        ]
    assert forests[1].nodes <= forests[0].nodes
    assert_same_purchase(*results)
    assert results[0].spent == results[1].spent
    assert results[0].floor_spent == results[1].floor_spent


def test_pruning_saves_nodes_where_the_budget_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    context = problem(3, monkeypatch)
    refiner = REFINERS.build("binary_extract")
    whole = build_forest(context, Prototype(), refiner)
    assert build_forest(context, Prototype(), refiner, 20).nodes < 0.8 * whole.nodes
    assert build_forest(context, Prototype(), refiner, 10**6).nodes == whole.nodes


def test_costly_refiners_are_not_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    context = problem(3, monkeypatch)
    refiner = REFINERS.build("two_level")
    whole = build_forest(context, Prototype(), refiner)
    assert build_forest(context, Prototype(), refiner, 1).nodes == whole.nodes


@settings(max_examples=10)
@given(seed=ints(0, 10_000), budget=ints(20, 300))
def test_a_guess_that_is_too_high_costs_time_only(seed: int, budget: int) -> None:
    """Without slack, the first layers often prune too much; growth is then repeated."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        context = problem(seed, monkeypatch)
        monkeypatch.setattr("gracekv.tree.prune._SLACK", 0.4)
        refiner = REFINERS.build("binary_extract")
        forests = [build_forest(context, Prototype(), refiner, limit) for limit in (None, budget)]
        results = [Greedy()(Frontier.empty(forest, budget), None) for forest in forests]
    assert_same_purchase(*results)
