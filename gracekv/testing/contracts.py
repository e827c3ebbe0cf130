"""Checks of the contract of each stage's strategies, for our tests and those of plugins.

    from gracekv.testing import contracts
    from gracekv.value import WindowAttention  # or your own strategy

    def test_window_attention_keeps_its_promises():
        contracts.check(WindowAttention(window=16))

Every check raises `AssertionError` that names the violation. Source: ours.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast, get_args

import torch
from torch import Tensor

from gracekv.allocate import Allocator, Budget, BudgetPlan, Floor, Frontier, Quota
from gracekv.allocate.operations import auction_start
from gracekv.decode import Decoder, HeldLayer
from gracekv.decode.cut import kept_entries, packed_entries
from gracekv.errors import ShapeError
from gracekv.pipeline import Pipeline
from gracekv.pipeline.composition import REGISTRIES
from gracekv.prefill import Needs, Prefill, Region
from gracekv.registry import Strategy
from gracekv.segment import Segmenter
from gracekv.testing.attention import check_backend as check_backend
from gracekv.testing.prefills import synthetic_prefill, with_observed
from gracekv.testing.selections import (
    Gains,
    check_forest,
    check_frontier,
    check_partition,
    check_run,
    hold,
    random_forest,
)
from gracekv.value import Memory, Scorer, Sensitivity


def check(strategy: Strategy, seeds: range = range(3)) -> None:
    """Raise `AssertionError` unless `strategy` fulfils the contract of its stage's interface.

    `seeds` are the seeds of random inputs.
    """
    check_value(strategy)
    for seed in seeds:
        check_stage(strategy, seed)


def check_value(strategy: Strategy) -> None:
    """Check that a strategy is registered plain data: frozen, hashable, restored from its fields.

    Raises `AssertionError` otherwise.
    """
    cls: Any = type(strategy)
    hold(REGISTRIES.get(cls.registry.stage) is cls.registry, f"{cls.__name__} has no stage")
    frozen = getattr(getattr(cls, "__dataclass_params__", None), "frozen", False)
    hold(frozen, f"{cls.__name__} is not a frozen dataclass")
    try:
        data = json.loads(json.dumps(strategy.to_dict()))
    except TypeError as error:
        raise AssertionError(f"the fields of {strategy} are not plain data: {error}") from error
    hold(cls.registry.parse(data) == strategy, f"{data} does not give {strategy} back")
    hold(hash(cls.registry.parse(data)) == hash(strategy), "equal strategies differ in their hash")
    line = cls.summary()
    sentence = line.endswith(".") and not line.startswith(f"{cls.__name__}(")
    hold(sentence, f"the docstring of {cls.__name__} does not begin with a sentence")


def check_stage(strategy: Strategy, seed: int) -> None:
    """Run the stage's checks on random inputs from `seed`; `AssertionError` if one fails."""
    stage = strategy.registry.stage
    rng = torch.Generator().manual_seed(seed)
    # Codings come in blocks, and windows hide a short region.
    context = 400 if stage == "precision" else int(torch.randint(2, 120, (), generator=rng))
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    prefill = synthetic_prefill(layers=3, dim=8, context=context, seed=seed, dtype=dtype)
    needs = getattr(strategy, "needs", Needs)()
    # Ours are included already, made from the prefill's own topics.
    own = [x for x in needs.observers if type(x).__module__.partition(".")[0] != "gracekv"]
    prefill = with_observed(prefill, own, seed)
    region = prefill.spans.region(min(int(torch.randint(0, 16, (), generator=rng)), context - 1))
    own_check: dict[str, Callable[[Any], object]] = {
        "segment": lambda x: check_segmenter(x, prefill, region),
        "value": lambda x: check_scorer(x, prefill, region),
        "sensitivity": lambda x: check_sensitivity(x, prefill),
        "quota": lambda x: check_quota(x, prefill),
        "decode": lambda x: check_decoder(x, prefill),
        "backend": lambda x: check_backend(x, seed),
        "floor": lambda x: _check_auctions(x, seed),
        "allocate": lambda x: _check_auctions(x, seed),
    }
    with _unchanged(prefill):
        if stage in own_check:
            own_check[stage](strategy)
        if stage != "backend":
            check_in_pipeline(strategy, prefill)


def check_segmenter(segmenter: Segmenter, prefill: Prefill, region: Region) -> None:
    """Slots cover `region`, the same in each call; an empty region is a `ShapeError`.

    Raises `AssertionError` otherwise.
    """
    first, second = segmenter(prefill, region), segmenter(prefill, region)
    check_partition(first, region, prefill.spans.length)
    hold(torch.equal(first.bounds, second.bounds), "the slots differ between two calls")
    with suppress(ShapeError):
        segmenter(prefill, Region(region.start, region.start))
        raise AssertionError("an empty region must raise ShapeError")


def check_scorer(scorer: Scorer, prefill: Prefill, region: Region) -> None:
    """Scores are finite, non-negative float32 for every token and head, the same in each call.

    Unless the scorer declares that it compares layers, each layer's scores must depend only on that
    layer and those below it.

    Raises `AssertionError` otherwise.
    """
    first, second = scorer(prefill, region), scorer(prefill, region)
    shape = (prefill.layers, prefill.kv_heads, region.length)
    hold(first.scores.shape == shape, f"scores must be {shape}; got {tuple(first.scores.shape)}")
    for name in ("scores", "seed_scores"):
        tensor: Tensor = getattr(first, name)
        hold(tensor.dtype == torch.float32, f"{name} must be float32; got {tensor.dtype}")
        hold((tensor >= 0).all() and tensor.isfinite().all(), f"{name} hold < 0 or NaN")
        hold(torch.equal(tensor, getattr(second, name)), f"{name} differ between two calls")
    compares = [x for x in vars(scorer).values() if isinstance(x, Scorer) and x.compares_layers]
    hold(scorer.compares_layers or not compares, "a scorer that it combines is not in `parts`")
    if not scorer.compares_layers:
        _check_by_layer(scorer, prefill, region, first.scores)
    total = float(first.seed_scores.sum())
    hold(abs(total - 1) < 1e-4, f"seed_scores must add up to 1; got {total}")


def _check_by_layer(scorer: Scorer, prefill: Prefill, region: Region, scores: Tensor) -> None:
    """Score layer after layer, each in tensors that are overwritten when the next one comes."""
    prefill = prefill.with_observations(scorer.needs().observers)
    prefill = prefill.with_queries(scorer.asks(prefill, region, {}))
    # Layer by layer, nothing is asked.
    memory: Memory = {}
    for capture in prefill:
        lent = {name: getattr(capture, name).clone() for name in ("keys", "values", "queries")}
        try:
            own = scorer.layer(dataclasses.replace(capture, **lent), region, memory).clone()
        except KeyError as error:
            text = f"{scorer.name!r} finds no {error}: layer by layer, no asks() or __call__ runs"
            raise AssertionError(text) from error
        hold(
            torch.allclose(own, scores[capture.number], rtol=1e-4, atol=1e-6),
            f"{scorer.name!r} compares layers: its scores of layer {capture.number} differ if "
            f"layers are scored one by one. Let compares_layers return True",
        )
        for tensor in lent.values():
            tensor.fill_(torch.nan)


def check_sensitivity(sensitivity: Sensitivity, prefill: Prefill) -> None:
    """Positive float32 weights [L, G] of mean 1, the same in each call; else `AssertionError`."""
    omega = sensitivity(prefill)
    shape = (prefill.layers, prefill.kv_heads)
    hold(omega.shape == shape and omega.dtype == torch.float32, f"omega must be float32 {shape}")
    hold((omega > 0).all(), "omega must be positive")
    hold(abs(float(omega.mean()) - 1) < 1e-4, f"omega must have mean 1; got {omega.mean()}")
    hold(torch.equal(omega, sensitivity(prefill)), "omega differs between two calls")
    if not sensitivity.compares_layers:
        each = torch.stack([sensitivity.layer(capture) for capture in prefill])
        hold(torch.allclose(each, omega), "layer() gives other weights: it compares layers")


def check_quota(quota: Quota, prefill: Prefill) -> None:
    """Non-negative integer caps [L, G] or None, the same in each call; else `AssertionError`."""
    layers, heads, context = prefill.layers, prefill.kv_heads, prefill.spans.context_length
    plan = BudgetPlan(layers, heads, context, layers * heads * context // 2 + 1, recent=0)
    sums = quota.uses_column_sums
    shape = (prefill.query_heads, prefill.spans.length) if sums else (heads, context)
    rng = torch.Generator().manual_seed(context)
    read = torch.rand(layers, *shape, generator=rng, dtype=torch.float32)
    caps, again = quota(read, plan), quota(read, plan)
    if caps is None or again is None:
        hold(caps is again, "one call returned caps, another None")
        return
    hold(caps.shape == (layers, heads), f"caps must be [L, G]; got {list(caps.shape)}")
    hold(not caps.is_floating_point() and (caps >= 0).all(), "caps must be whole and >= 0")
    hold(torch.equal(caps, again), "caps differ between two calls")
    if not (sums or quota.compares_layers):
        for number, (own, whole) in enumerate(zip(read, caps, strict=True)):
            cap = quota.layer(own, number, plan)
            same = cap is not None and torch.equal(cap, whole)
            hold(same, "layer() gives other caps: it compares layers")


def check_floor(floor: Floor, forest: Any, plan: BudgetPlan, tokens: Tensor) -> Frontier:
    """Check that the frontier is within B_base and return it, or raise `AssertionError`.

    Args:
        floor: the strategy to check.
        forest: a `Forest`.
        plan: the budget in entries.
        tokens: R^tok [L, G, N].
    """
    if (candidates := floor.candidates(tokens, plan)) is not None:
        hold(candidates.shape == tokens.shape, f"candidates must be {list(tokens.shape)}")
        hold(not candidates.isnan().any(), "candidates hold NaN")
    frontier = floor.realize(forest, candidates, plan, None)
    check_frontier(frontier)
    hold(frontier.budget == plan.base, "the budget of the floor's frontier is not B_base")
    hold(frontier.floor_spent == frontier.spent, "floor_spent differs from the entries spent")
    return frontier


def check_allocator(allocator: Allocator, start: Frontier, quota: Tensor | None) -> None:
    """A valid frontier within budget and `quota` that keeps `start`, the same in each call.

    No operation that budget and quota allow is left. `quota` is int64 [L, G] or None. Raises
    `AssertionError` otherwise.
    """
    result, again = allocator(start, quota), allocator(start, quota)
    check_frontier(result, quota)
    for name in ("added", "split"):
        before, after = getattr(start, name), getattr(result, name)
        hold(not (before & ~after).any(), f"{name}: purchases of the floor are missing")
        hold(torch.equal(after, getattr(again, name)), f"{name} differs between two calls")
    same = (result.budget, result.floor_spent) == (start.budget, start.floor_spent)
    hold(same, "budget or floor_spent were changed")
    ops, executed, left = auction_start(result, quota)
    open_ = ops.available(executed) & ops.offered(executed, elastic=allocator.elastic)
    caps = left.total if left.per_head is None else left.per_head[ops.head()].clamp(max=left.total)
    hold(not (open_ & (ops.cost <= caps)).any(), "an affordable operation is left")


def check_decoder(decoder: Decoder, prefill: Prefill) -> None:
    """Finite scores [G, N] of every entry, the same each time, and a cut that uses them.

    Raises `AssertionError` otherwise, and what the cut raises.
    """
    keys, queries = prefill.keys[0], prefill.queries[0].float()
    places = torch.arange(keys.shape[1]).expand(keys.shape[:2])
    asked = queries.unflatten(0, (len(keys), -1)) * prefill.scale
    asked = asked[:, :, max(0, asked.shape[2] - decoder.queries) :]
    none = torch.zeros(places.shape, dtype=torch.float32)
    values, now = prefill.values[0], keys.shape[1]
    held = HeldLayer(0, keys, values, none, places, asked, asked, none, 3, now)
    first, second = decoder.scores(held), decoder.scores(held)
    hold(first.shape == places.shape, f"scores must be {list(places.shape)}")
    hold(first.isfinite().all(), "scores hold infinity or NaN")
    hold(torch.equal(first, second), "scores differ between two calls")
    layers = [held, dataclasses.replace(held, number=1)]
    kept, _ = kept_entries(2, layers.__getitem__, decoder, places.numel(), 1)
    packed_entries(layers[1], kept[1], decoder)


def check_in_pipeline(strategy: Strategy, prefill: Prefill) -> None:
    """Run the paper's pipeline with `strategy` in its stage, and check every stage's result.

    Two runs are equal and keep to the budget and the required entries; else `AssertionError`.
    """
    fields: dict[str, Any] = {strategy.registry.stage: strategy, "prune": False}
    pipeline = dataclasses.replace(Pipeline.named("gracekv"), **fields)
    hold(Pipeline.from_dict(pipeline.to_dict()) == pipeline, "the pipeline is not plain data")
    budget = Budget.ratio(2)
    run, again = pipeline.run(prefill, budget), pipeline.run(prefill, budget)
    check_run(run, prefill)
    if run.forest is not None and run.frontier is not None:
        check_forest(run.forest)
        check_frontier(run.frontier)
    for one, two in zip(run.cache.layers, again.cache.layers, strict=True):
        for name, tensor in one.tensors().items():
            hold(torch.equal(tensor, two.tensors()[name]), f"{name} differ between runs")


def _check_auctions(strategy: Strategy, seed: int) -> None:
    forest = random_forest(seed, slot_tokens=9, gains=get_args(Gains)[seed % 4])
    count = int(forest.end.max() - forest.start.min())
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.rand(forest.layers, forest.heads, count, generator=rng, dtype=torch.float32) ** 4
    plan = BudgetPlan(forest.layers, forest.heads, count, 25, recent=0)
    if isinstance(strategy, Floor):
        check_floor(strategy, forest, plan, tokens)
        return
    for quota in (None, torch.randint(0, 12, (forest.layers, forest.heads), generator=rng)):
        check_allocator(cast(Allocator, strategy), Frontier.empty(forest, plan.base), quota)


@contextmanager
def _unchanged(prefill: Prefill) -> Iterator[None]:
    """Check that strategies neither modify their inputs nor use torch's global generator."""
    tensors = [*prefill.keys, *prefill.values, *prefill.queries]
    before, state = [tensor._version for tensor in tensors], torch.get_rng_state()
    yield
    hold([x._version for x in tensors] == before, "the prefill's tensors were modified")
    hold(torch.equal(torch.get_rng_state(), state), "torch's global generator was used")
