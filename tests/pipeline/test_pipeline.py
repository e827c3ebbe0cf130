"""The composed method: budgets, FullKV recovery, isolation of the ablations, refusals."""

import dataclasses

import pytest
import torch
from hypothesis import given

from gracekv import Budget, Pipeline, recipes, strategies
from gracekv.allocate import ALLOCATORS
from gracekv.errors import BudgetError, ConfigError, MissingCaptureError, UnknownStrategyError
from gracekv.pipeline.composition import REGISTRIES
from gracekv.prefill import Prefill
from gracekv.prefill.observer import Observer
from gracekv.registry import Strategy
from gracekv.segment.curvature import BlockInput
from gracekv.segment.surprisal import Surprisal
from gracekv.testing import synthetic_prefill
from gracekv.testing.selections import check_run
from gracekv.value.kvzip_two_pass import Reconstruction
from gracekv.value.output_projection import ProjectedNorms, ProjectionNorms
from support.draws import floats, ints, some
from support.lean_prefills import without_context_queries
from support.same_results import assert_same_entries


@given(
    seed=ints(0, 10_000), ratio=floats(1.0, 40.0), layers=ints(1, 3), heads=ints(1, 3),
    context=ints(5, 200), recipe=some(recipes.names()),
)  # fmt: skip
def test_budget_is_never_exceeded(
    seed: int, ratio: float, layers: int, heads: int, context: int, recipe: str
) -> None:
    prefill = synthetic_prefill(layers=layers, kv_heads=heads, context=context, dim=8, seed=seed)
    try:
        run = Pipeline.named(recipe).run(prefill, Budget.ratio(ratio))
    except BudgetError:
        # Where entries are quantised, 4 recent ones in float32 are the bytes of 8 in 16 bits.
        least = 8 if Pipeline.named(recipe).precision.name != "full" else 4
        assert ratio > context / least - 1
        return
    accounting = run.accounting
    assert accounting.spent == int(accounting.entries.sum())
    if Pipeline.named(recipe).keep_all:
        assert accounting.spent == layers * heads * context
    else:
        check_run(run, prefill)


@pytest.mark.parametrize("recipe", recipes.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ratio_one_is_the_original_cache(recipe: str, dtype: torch.dtype) -> None:
    prefill = synthetic_prefill(dtype=dtype)
    pipeline = Pipeline.named(recipe)
    if pipeline.keep_all and pipeline.precision.name != "full":
        pytest.skip("it quantises whatever the budget")
    if dtype == torch.float32 and pipeline.precision.name != "full":
        pytest.skip("it counts bytes of 16-bit numbers, of which float32 has twice as many")
    run = pipeline.run(prefill, Budget.ratio(1))
    for layer, packed in enumerate(run.cache.layers):
        for g in range(prefill.kv_heads):
            keys, values, positions, log_m = packed.head(g)
            assert torch.equal(keys.to(dtype), prefill.keys[layer][g, :-1])
            assert torch.equal(values.to(dtype), prefill.values[layer][g, :-1])
            assert torch.equal(positions.long(), torch.arange(prefill.spans.length - 1))
            assert not log_m.any()
    assert run.accounting.bytes == run.accounting.full_bytes


def test_a_full_cache_is_counted_in_16_bits_where_entries_are_quantised() -> None:
    prefill = synthetic_prefill(seed=0, context=400, dim=32)
    for recipe, budget, bits in (
        ("gracekv-plus", Budget.entries_per_head(100), 32),
        ("gracekv-plus-allocated", Budget.entries_per_head(100), 32),
        ("gracekv-plus-allocated", Budget.ratio(4), 16),
        ("fullkv-4bit", Budget.entries_per_head(400), 16),
    ):
        kept = Pipeline.named(recipe).run(prefill, budget).accounting
        covered = prefill.layers * prefill.kv_heads * (prefill.spans.length - 1)
        assert kept.full_bytes == covered * 2 * 32 * bits // 8
        assert kept.full_in_16_bits == (bits == 16)


@pytest.mark.parametrize("ratio", [1.1, 2, 8, 20])
@pytest.mark.parametrize("elastic", [False, True])
def test_pruning_does_not_change_the_cache(ratio: float, elastic: bool) -> None:
    prefill = synthetic_prefill(context=260, layers=5, seed=3)
    allocate = {"name": "greedy", "elastic": elastic}
    pruned, whole = (
        Pipeline.from_dict({"allocate": allocate, "prune": prune}).run(prefill, Budget.ratio(ratio))
        for prune in (True, False)
    )
    assert_same_entries(pruned.cache, whole.cache)
    assert pruned.accounting.utility == pytest.approx(whole.accounting.utility, rel=1e-12)


@pytest.mark.parametrize("question", [0, 8])
def test_a_merged_entry_has_the_score_of_all_its_tokens(question: int) -> None:
    # Without a question, the last entry may hold the token that decoding feeds again.
    prefill = synthetic_prefill(context=260, layers=3, seed=3, question=question, tail=question)
    window = {"size": question, "minimum": question}
    run = Pipeline.from_dict({"window": window}).run(prefill, Budget.ratio(8))
    chosen, scores = run.selection, run.relevance.scores.flatten(0, 1)
    scores = torch.nn.functional.pad(scores, (chosen.region[0], 0))
    spans = [*zip(chosen.head_of_entry(), chosen.start, chosen.end, strict=True)]
    want = [scores[head, a:b].sum() for head, a, b in spans if a < run.cache.length]
    got = torch.cat(run.entry_scores())
    assert (chosen.end - chosen.start).max() > 1
    torch.testing.assert_close(got[got.isfinite()], torch.stack(want), rtol=0.04, atol=1e-5)
    # The best token of a node, kept alone, has its own score.
    run = Pipeline.from_dict({"window": window, "pack": "evict"}).run(prefill, Budget.ratio(8))
    best = torch.stack([scores[head, a:b].max() for head, a, b in spans if a < run.cache.length])
    got = torch.cat(run.entry_scores())
    torch.testing.assert_close(got[got.isfinite()], best, rtol=0.04, atol=1e-5)


@pytest.mark.parametrize("recipe", ["gracekv", "gracekv-no-floor", "gracekv-no-global"])
@pytest.mark.parametrize("ratio", [2, 8])
def test_the_certificate_bounds_every_allocator(recipe: str, ratio: int) -> None:
    prefill = synthetic_prefill(context=400, layers=2, seed=5)
    base, budget = dataclasses.replace(Pipeline.named(recipe), certify=True), Budget.ratio(ratio)
    plain = base.run(prefill, budget)
    better = dataclasses.replace(base, allocate=ALLOCATORS.build("lagrangian")).run(prefill, budget)
    for run in (plain, better):
        assert run.accounting.bound is not None
        assert 0 < run.accounting.utility <= run.accounting.bound * (1 + 1e-12)
    assert plain.accounting.bound == pytest.approx(better.accounting.bound, rel=1e-6)
    assert better.accounting.utility >= plain.accounting.utility
    # A certificate does not change what is kept.
    without = Pipeline.named(recipe).run(prefill, budget)
    assert without.accounting.certified_ratio is None
    assert_same_entries(plain.cache, without.cache)


def fingerprint(pipeline: Pipeline, prefill: Prefill) -> dict[str, list[float]]:
    """The output of each stage, as comparable numbers."""
    run = pipeline.run(prefill, Budget.ratio(6))
    assert run.partition is not None
    assert run.relevance is not None
    assert run.forest is not None
    candidates = pipeline.floor.candidates(run.relevance.scores, run.plan)
    quota = pipeline.quota(run.relevance.scores, run.plan)
    return {
        "partition": run.partition.bounds.tolist(),
        "relevance": run.relevance.scores.flatten().tolist(),
        "sensitivity": run.relevance.sensitivity.flatten().tolist(),
        "floor": [] if candidates is None else candidates.flatten().tolist(),
        "quota": [] if quota is None else quota.flatten().tolist(),
        "forest": [*run.forest.start.tolist(), *run.forest.end.tolist()],
    }


@pytest.mark.parametrize(("recipe", "changed"), [
    # A change affects the stages that read its output; all others must be untouched.
    ("gracekv-no-multihop", {"relevance", "floor", "forest"}),
    ("gracekv-no-floor", {"floor", "forest"}),
    ("gracekv-no-curvature", {"partition", "forest"}),
    ("gracekv-no-multiresolution", {"forest"}),
    ("gracekv-no-global", {"quota"}),
])  # fmt: skip
def test_ablations_isolate_one_component(recipe: str, changed: set[str]) -> None:
    prefill = synthetic_prefill(context=200, layers=3, seed=2)
    # The quota may affect how far trees are grown, but not the trees themselves.
    paper, ablated = (
        dataclasses.replace(pipeline, prune=False)
        for pipeline in (Pipeline.named("gracekv"), Pipeline.named(recipe))
    )
    before, after = fingerprint(paper, prefill), fingerprint(ablated, prefill)
    assert {stage for stage in before if before[stage] != after[stage]} == changed
    fields = {f.name for f in dataclasses.fields(Pipeline)}
    switched = {name for name in fields if getattr(paper, name) != getattr(ablated, name)}
    assert len(switched) == (2 if recipe == "gracekv-no-curvature" else 1)


@pytest.mark.parametrize(("data", "error", "message"), [
    ({"refine": {"name": "binary", "reward": -1.0}}, ConfigError, ">= 0"),
    ({"window": {"size": 2}}, ConfigError, "minimum must not exceed"),
    ({"distortion": {"name": "prototype", "memory_limit": 3}}, ConfigError, "1 MiB"),
    ({"allocate": "none"}, UnknownStrategyError, "Registered: "),
    ({"keep_all": "yes"}, ConfigError, "takes True or False"),
])  # fmt: skip
def test_bad_configurations(data: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Pipeline.from_dict(data)


@pytest.mark.parametrize("missing", [Surprisal, BlockInput, ProjectionNorms, ProjectedNorms])
def test_missing_captures_are_named(missing: type[Observer]) -> None:
    prefill = synthetic_prefill(context=150).without(missing)
    with pytest.raises(MissingCaptureError, match=missing.__name__):
        Pipeline.named("gracekv").run(prefill, Budget.ratio(4))


def test_captures_that_no_stage_needs_may_be_missing() -> None:
    pipeline = Pipeline.from_dict({
        "segment": "uniform", "value": {"name": "multi_hop", "hops": 0}, "sensitivity": "none",
        "distortion": "unit", "refine": {"name": "binary", "candidates": 0, "reward": 0.0},
    })  # fmt: skip
    full = synthetic_prefill(context=150)
    lean = dataclasses.replace(without_context_queries(full), observed={})
    assert_same_entries(*(pipeline.run(x, Budget.ratio(4)).cache for x in (full, lean)))


def test_no_pipeline_pays_for_what_another_captured() -> None:
    parts = ("prefill", "surprisal", "projections", "reconstruction")
    seconds = {"prefill": 1.0, Surprisal(): 2.0, ProjectedNorms(): 4.0, Reconstruction(): 8.0}
    prefill = dataclasses.replace(synthetic_prefill(context=150), seconds=seconds)

    def captured(recipe: str, ratio: int = 4) -> float:
        timings = Pipeline.named(recipe).run(prefill, Budget.ratio(ratio)).timings.as_dict()
        return sum(timings[part] for part in parts)

    assert captured("gracekv") == 7.0
    assert captured("h2o") == 1.0
    assert captured("kvzip-two-pass") == 9.0
    assert captured("fullkv") == captured("kvzip-two-pass", ratio=1) == 1.0


def test_strategies_lists_every_stage_with_descriptions() -> None:
    listed = strategies()
    assert set(listed) == set(REGISTRIES)
    for stage, names in listed.items():
        assert names, stage
        assert all(line and not line.endswith(("(", ",")) for line in names.values())
    assert {f.name for f in dataclasses.fields(Pipeline)} >= set(REGISTRIES)
    assert all(isinstance(getattr(Pipeline.named("gracekv"), stage), Strategy) for stage in listed)


def test_slots_of_one_token_are_not_cut():
    assert not Pipeline.from_dict({"refine": "binary_extract"}, "snapkv").needs().observers
