"""Pruned growth gives the greedy auction the same frontier."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.allocate import BudgetPlan, Frontier, Greedy, Singleton
from gracekv.allocate.reference import greedy_heap
from gracekv.tree import REFINERS, Prototype, TreeContext, build_forest
from gracekv.tree.prune import Pruner
from support.covering import LONG
from support.purchases import assert_same_purchase
from support.trees import tree_context


def reference_auction(greedy: Greedy, start: Frontier, quota: torch.Tensor | None) -> Frontier:
    return greedy_heap(start, quota, elastic=greedy.elastic)


Auction = Callable[[Greedy, Frontier, torch.Tensor | None], Frontier]


def problem(seed: int, groups: bool, monkeypatch: pytest.MonkeyPatch) -> TreeContext:
    context = tree_context(seed, layers=5, context=50)
    # One layer at a time, so that later layers are pruned by what earlier ones showed.
    monkeypatch.setattr("gracekv.tree.build._GROUP_BYTES", 1 if groups else 2**30)
    return context


@pytest.mark.parametrize("refiner", ["binary_extract", "binary", "extract"])
@pytest.mark.parametrize("auction", [Greedy.__call__, reference_auction])
@settings(max_examples=100 if LONG else 6)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(1, 450),
    floor=st.booleans(),
    elastic=st.booleans(),
    # At a small alpha most candidates, one per head at least, stay unrealised.
    alpha=st.sampled_from([0.05, 0.2, 0.6, 1.0]),
)
def test_pruned_forests_give_the_same_frontier(
    auction: Auction, refiner: str, seed: int, budget: int, floor: bool, elastic: bool, alpha: float
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        context = problem(seed, True, monkeypatch)
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
            auction(Greedy(elastic), keeper.realize(forest, candidates, plan, None), None)
            for forest in forests
        ]
    assert forests[1].nodes <= forests[0].nodes
    assert_same_purchase(*results)
    assert results[0].spent == results[1].spent
    assert results[0].floor_spent == results[1].floor_spent


def test_pruning_saves_nodes_where_the_budget_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    context = problem(3, True, monkeypatch)
    refiner = REFINERS.build("binary_extract")
    whole = build_forest(context, Prototype(), refiner)
    assert build_forest(context, Prototype(), refiner, 20).nodes < 0.8 * whole.nodes
    assert build_forest(context, Prototype(), refiner, 10**6).nodes == whole.nodes


def test_costly_refiners_are_not_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    context = problem(3, True, monkeypatch)
    refiner = REFINERS.build("two_level")
    whole = build_forest(context, Prototype(), refiner)
    assert build_forest(context, Prototype(), refiner, 1).nodes == whole.nodes


def test_the_threshold_is_where_known_operations_exceed_the_budget() -> None:
    pruner = Pruner(budget=4)
    keys = torch.tensor([5.0, 4.0, 3.0, 3.0, 1.0], dtype=torch.float64)
    pruner.add(keys[:2], torch.tensor([1, 2]))
    assert pruner.threshold == 0.0
    # Ties at the threshold stay known.
    pruner.add(keys[2:], torch.tensor([1, 1, 1]))
    assert pruner.threshold == 3.0
    pruner.add(torch.tensor([9.0, 1.0], dtype=torch.float64), torch.tensor([2, 1]))
    assert pruner.threshold == 4.0


def test_the_threshold_waits_for_enough_operations() -> None:
    pruner = Pruner(budget=40)
    pruner.add(torch.full((9,), 2.0, dtype=torch.float64), torch.full((9,), 1))
    pruner.add(torch.full((33,), 5.0, dtype=torch.float64), torch.full((33,), 1))
    assert pruner.threshold == 2.0
    pruner.add(torch.full((9,), 7.0, dtype=torch.float64), torch.full((9,), 1))
    assert pruner.threshold == 2.0
    pruner.add(torch.full((2,), 7.0, dtype=torch.float64), torch.full((2,), 1))
    assert pruner.threshold == 5.0


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), budget=st.integers(20, 300))
def test_a_guess_that_is_too_high_costs_time_only(seed: int, budget: int) -> None:
    """Without slack the first layers often prune too much; growth is then repeated."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        context = problem(seed, True, monkeypatch)
        monkeypatch.setattr("gracekv.tree.prune._SLACK", 0.4)
        plan = BudgetPlan(
            layers=5, heads=2, context=context.partition.region.length, total=budget, recent=0
        )
        auction = Greedy()
        results = [
            auction(Frontier.empty(forest, plan.base), None)
            for forest in (
                build_forest(context, Prototype(), REFINERS.build("binary_extract"), limit)
                for limit in (None, budget)
            )
        ]
    assert_same_purchase(*results)
