import importlib.util

import pytest
import torch
from hypothesis import given

from gracekv.allocate import BudgetPlan, NoFloor, Singleton
from gracekv.allocate.reference import floor_candidates, realize_floor
from gracekv.errors import ShapeError
from gracekv.testing.selections import check_frontier, random_forest
from support.draws import SEEDS, bools, floats, ints, some

# Number of operations from which the compiled walk is used: never, and always.
COMPILED = [10**9, 0] if importlib.util.find_spec("numba") else [10**9]


def draw_relevance(heads, count, seed, ties):
    rng, shape = torch.Generator().manual_seed(seed), (2, heads, count)
    if ties:
        relevance = torch.randint(0, 3, shape, generator=rng).double() + 1e-3
    else:
        relevance = torch.randn(shape, generator=rng, dtype=torch.float64).mul(2).exp()
    return relevance / relevance.sum(-1, keepdim=True)


@given(
    seed=SEEDS, count=ints(1, 40), base=ints(0, 120), alpha=some([0.0, 0.3, 0.6, 1.0]),
    pool=some([1, 3, 7]), eta=some([0.5, 0.95]), consensus=some([0.0, 0.5, 0.9]), ties=bools(),
    unit=some([0.0, 0.3, 1.0]),
)  # fmt: skip
def test_candidates_match_the_reference(seed, count, base, alpha, pool, eta, consensus, ties, unit):
    floor = Singleton(alpha=alpha, pool=pool, eta=eta, consensus=consensus)
    plan, drawn = BudgetPlan(2, 3, count, base, 0), draw_relevance(3, count, seed, ties)
    fast, slow = floor.candidates(unit * drawn, plan), floor_candidates(floor, unit * drawn, plan)
    if slow is None:
        assert fast is None
    else:
        assert torch.equal(fast > -torch.inf, slow > -torch.inf)
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=0)
        assert unit > 0 or not (fast > -torch.inf).any()


@given(seed=SEEDS, count=ints(1, 40), base=ints(2, 120), ties=bools())
def test_candidates_do_not_depend_on_the_unit_of_scores(seed, count, base, ties):
    plan, relevance = BudgetPlan(2, 3, count, base, 0), draw_relevance(3, count, seed, ties)
    own = Singleton().candidates(relevance, plan)
    # Powers of two, which cause no rounding.
    for unit in (2**-6, 2**6):
        assert torch.equal(Singleton().candidates(unit * relevance, plan), unit * own)
    # If each head's scores add up to 1, these are the paper's thresholds.
    assert (own[own > -torch.inf] >= 1.2 / count - 1e-12).all()


@given(
    seed=SEEDS, alpha=some([0.1, 0.6, 1.0]), head_cap=some([0.5, 2.0, 50.0]), capped=bools(),
    ties=bools(), part=floats(0, 1), compiled=some(COMPILED),
)  # fmt: skip
def test_realize_matches_the_reference_and_respects_its_caps(
    seed, alpha, head_cap, capped, ties, part, compiled
):
    forest = random_forest(seed, layers=2, heads=2, slots=2, slot_tokens=9, whole=0.4, prune=0.2)
    count = int(forest.end.max() - forest.start.min())
    plan = BudgetPlan(2, 2, count, int(part * 4 * count), 0)
    floor = Singleton(alpha=alpha, head_cap=head_cap)
    rng = torch.Generator().manual_seed(seed)
    quota = torch.randint(0, 12, (2, 2), generator=rng) if capped else None
    wanted = draw_relevance(2, count, seed, ties)
    wanted[torch.rand(wanted.shape, generator=rng) < 0.4] = -torch.inf
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("gracekv.allocate.singleton._COMPILED", compiled)
        fast = floor.realize(forest, wanted, plan, quota)
    slow = realize_floor(floor, forest, wanted, plan, quota)
    check_frontier(fast, quota)
    assert torch.equal(fast.added, slow.added)
    assert torch.equal(fast.split, slow.split)
    assert fast.floor_spent == slow.floor_spent == fast.spent
    assert fast.floor_spent <= floor.limit(plan)
    assert (fast.entries_per_head() <= floor.head_limit(plan)).all()


def test_alpha_is_exact():
    # 0.29 * 100 is 28.999... in binary.
    assert Singleton(alpha=0.29).limit(BudgetPlan(1, 1, 200, 100, 0)) == 29


def test_no_candidates_and_no_floor_buy_nothing():
    forest, plan = random_forest(1), BudgetPlan(2, 2, 30, 17, 0)
    for floor in (Singleton(), NoFloor()):
        frontier = floor.realize(forest, None, plan, None)
        assert (frontier.spent, frontier.floor_spent, frontier.budget) == (0, 0, 17)
    assert NoFloor().candidates(torch.ones(2, 2, 30), plan) is None


def test_candidates_of_another_forest_are_refused():
    plan = BudgetPlan(2, 2, 30, 17, 0)
    with pytest.raises(ShapeError, match="one plan"):
        Singleton().realize(random_forest(1), torch.ones(2, 2, 999), plan, None)
