"""Selecting single tokens without trees equals the auction over trees, down to ties."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from gracekv import Budget, Pipeline, recipes
from gracekv.allocate import Frontier, Greedy, Selection
from gracekv.allocate.top_tokens import entry_gains, largest, top_tokens
from gracekv.errors import NonFiniteError, ShapeError
from gracekv.segment import Partition
from gracekv.testing import synthetic_prefill
from gracekv.tree import LeafOnly, PrototypeRule, TreeContext, Unit, build_forest
from support.covering import cases
from support.draws import SEEDS, bools, floats, ints, lists, some
from support.same_results import assert_same_entries

PREFILL = synthetic_prefill(layers=3, kv_heads=2, context=40, dim=4)
REGION = PREFILL.spans.region(recent=3)
TOKEN_RECIPES = [name for name in recipes.names() if Pipeline.named(name).segment.name == "tokens"]


def drawn(kind, generator):
    shape = (3, 2, REGION.length)
    if kind == "whole numbers":
        return torch.randint(0, 4, shape, generator=generator).float()
    if kind == "tiny":  # many float32 values become equal, or 0, after the weights
        return torch.rand(shape, generator=generator) * 1e-44
    if kind == "zeros":
        return torch.zeros(shape)
    close = 1 + torch.randint(0, 3, shape, generator=generator) * torch.finfo(torch.float32).eps
    return close if kind == "close" else torch.rand(shape, generator=generator) ** 4


@settings(max_examples=cases(100, 300))
@given(
    seed=SEEDS, kind=some(["spread", "whole numbers", "close", "tiny", "zeros"]),
    weights=some(["ones", "spread", "whole numbers"]), budget=ints(0, 6 * REGION.length),
    capped=bools(), elastic=bools(),
)  # fmt: skip
def test_the_auction_over_trees_keeps_the_same_tokens(seed, kind, weights, budget, capped, elastic):
    generator = torch.Generator().manual_seed(seed)
    scores = drawn(kind, generator)
    omega = {
        "ones": torch.ones(3, 2),
        "spread": torch.rand(3, 2, generator=generator) * 2,
        "whole numbers": torch.randint(0, 3, (3, 2), generator=generator).float(),
    }[weights]
    quota = torch.randint(0, REGION.length + 5, (3, 2), generator=generator) if capped else None
    context = TreeContext(
        prefill=PREFILL, partition=Partition(torch.arange(REGION.start, REGION.end + 1)),
        scores=scores, seed_scores=torch.zeros(REGION.length), sensitivity=omega,
        rule=PrototypeRule(),
    )  # fmt: skip
    forest = build_forest(context, Unit(), LeafOnly())
    slow = Greedy(elastic=elastic)(Frontier.empty(forest, budget), quota)
    kept = top_tokens(scores, omega, budget, quota, elastic=elastic)
    assert torch.equal(kept.flatten(), slow.kept)
    fast, over_trees = Selection.of_tokens(kept, REGION.start), Selection.of_frontier(slow)
    assert float(entry_gains(scores, omega, fast).sum()) == slow.utility
    assert fast.region == over_trees.region
    for name in ("offsets", "start"):
        assert torch.equal(getattr(fast, name), getattr(over_trees, name))
    assert torch.equal(over_trees.end, fast.start + 1)


@pytest.mark.parametrize("recipe", TOKEN_RECIPES)
@pytest.mark.parametrize("ratio", [1.3, 4])
def test_recipes_need_no_trees_and_keep_the_same_entries(recipe, ratio):
    prefill = synthetic_prefill(layers=2, kv_heads=2, context=90, dim=8, seed=4)
    fast = Pipeline.named(recipe).run(prefill, Budget.ratio(ratio))
    assert fast.forest is None
    if fast.plan.keeps_all:
        pytest.skip("quantised, all entries fit")
    # A certificate needs the trees.
    certified = dataclasses.replace(Pipeline.named(recipe), certify=True)
    slow = certified.run(prefill, Budget.ratio(ratio))
    assert slow.forest is not None
    for name in ("spent", "floor_spent", "utility", "bytes", "metadata_bytes"):
        assert getattr(fast.accounting, name) == getattr(slow.accounting, name)
    assert torch.equal(fast.accounting.entries, slow.accounting.entries)
    assert_same_entries(fast.cache, slow.cache)


OTHERS = {
    "floor": "singleton", "distortion": "prototype", "allocate": "lagrangian",
    "segment": {"name": "uniform", "target_length": 2}, "certify": True,
}  # fmt: skip


@pytest.mark.parametrize("field", OTHERS)
def test_others_are_left_to_the_trees(field):
    prefill = synthetic_prefill(layers=2, kv_heads=2, context=60, dim=8)
    fields = {field: OTHERS[field], "window": {"size": 4}}
    pipeline = Pipeline.from_dict(fields, base="global-eviction")
    assert pipeline.run(prefill, Budget.ratio(3)).forest is not None


@given(values=lists(some([0.0, 0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=30), share=floats(0, 1))
def test_largest_takes_the_earlier_of_equals(values, share):
    count = round(share * len(values))
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert largest(torch.tensor(values), count).nonzero().flatten().tolist() == sorted(best)


def test_what_cannot_be_ranked_is_refused():
    scores, omega = torch.rand(2, 2, 9), torch.ones(2, 2)
    with pytest.raises(ShapeError, match="quota"):
        top_tokens(scores, omega, 5, torch.ones(3, 2))
    for bad in (torch.nan, torch.inf, -torch.inf):
        for wrong in ((scores * bad, omega), (scores, omega * bad)):
            with pytest.raises(NonFiniteError, match="NaN"):
                top_tokens(*wrong, 5, None)
