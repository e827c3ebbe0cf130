"""Cutting layer by layer keeps the same as one cut at the end, ties included."""

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gracekv.allocate import Budget, Selection
from gracekv.allocate.top_tokens import entry_gains, top_tokens
from gracekv.errors import ShapeError
from gracekv.pipeline import Pipeline
from gracekv.pipeline.compression import Compression
from gracekv.prefill import Needs
from gracekv.registry import Registry
from gracekv.segment import Partition
from gracekv.segment.surprisal import Surprisal
from gracekv.testing import synthetic_prefill
from gracekv.value import Scorer
from support.draws import bools, ints, some
from support.thread_exchange import in_threads, part_of

# Local to this file, so that no other test finds them.
OWN: Registry[Scorer] = Registry("own", "scores for tests")


@OWN.register("tied", works_sharded=True)
class Tied(Scorer):
    """Scores with few values, so that most of them tie."""

    levels: int = 3

    def layer(self, capture, region, memory):
        return (capture.keys[:, region.start : region.end].norm(dim=-1) * 7).floor() % self.levels


@OWN.register("late")
class Late(Scorer):
    """A layerwise score that also reads surprisal."""

    layer = Tied.layer

    def needs(self):
        return Needs.observed(Surprisal())


def tied(levels, base, **fields):
    """The recipe with such scores and without a fit."""
    pipeline = Pipeline.from_dict({**fields, "fit": "none"}, base=base)
    return dataclasses.replace(pipeline, value=Tied(levels))


def layerwise(pipeline, prefill, budget):
    """The run over layers that come one after the other, with tensors that are only lent."""
    made = Compression(pipeline, pipeline.plan(prefill, budget))
    for capture in prefill:
        lent = {name: getattr(capture, name).clone() for name in ("keys", "values", "queries")}
        made.layer(dataclasses.replace(capture, **lent))
        for tensor in lent.values():
            tensor.fill_(torch.nan)
    return made.finish((), {}, {})


def held(pipeline, prefill, budget):
    """The run over a prefill with all layers present when the entries are selected."""
    plan = pipeline.plan(prefill, budget)
    region = prefill.spans.region(plan.recent)
    scored = pipeline.value(prefill, region)
    caps = pipeline.quota(scored.scores, plan)
    omega = pipeline.sensitivity(prefill)
    kept = top_tokens(scored.scores, omega, plan.base, caps, elastic=pipeline.allocate.elastic)
    return Selection.of_tokens(kept, region.start)


def assert_same_entries(got, want):
    for one, two in zip(got.cache.layers, want.cache.layers, strict=True):
        assert torch.equal(one.offsets, two.offsets)
        assert torch.equal(one.positions, two.positions)
        assert torch.equal(one.keys, two.keys)
        torch.testing.assert_close(one.values, two.values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.log_multiplicity, two.log_multiplicity, rtol=1e-4, atol=1e-5)


@settings(max_examples=40)
@given(
    seed=ints(0, 2**16), ratio=some([1.3, 2, 5, 9]), levels=ints(1, 4),
    quota=some(["global", "per_head", "adaptive_heads", "pyramid"]), elastic=bools(),
    suffix=bools(),
)  # fmt: skip
def test_the_running_cut_is_the_cut_at_the_end(seed, ratio, levels, quota, elastic, suffix):
    sizes = {"question": 3, "tail": 2} if suffix else {"question": 0, "tail": 0}
    prefill = synthetic_prefill(seed=seed, context=50, layers=4, kv_heads=2, **sizes)
    base = "gracekv-plus" if suffix else "gracekv-agnostic"
    pipeline = tied(levels, base, quota=quota, allocate={"name": "greedy", "elastic": elastic})
    budget = Budget.ratio(ratio)
    got, want = layerwise(pipeline, prefill, budget), held(pipeline, prefill, budget)
    for name in ("offsets", "start"):
        assert torch.equal(getattr(got.selection, name), getattr(want, name))
    gains = entry_gains(got.relevance.scores, got.relevance.sensitivity, want)
    assert math.isclose(got.accounting.utility, float(gains.sum()), rel_tol=1e-12)
    assert_same_entries(got, pipeline.run(prefill, budget))
    for layer, capture in zip(got.cache.layers, prefill, strict=True):
        for head in range(layer.heads):
            keys, values, positions, _ = layer.head(head)
            assert torch.equal(keys, capture.keys[head, positions.long()])
            assert torch.equal(values, capture.values[head, positions.long()])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("levels", [1, 3])
def test_processes_make_one_cut(ranks, levels):
    prefill = synthetic_prefill(seed=7, context=60, layers=3, kv_heads=4)
    pipeline = tied(levels, "gracekv-plus")
    want = pipeline.run(prefill, Budget.ratio(4))

    def one(shard):
        return layerwise(pipeline, part_of(prefill, shard, observed={}), Budget.ratio(4))

    for rank, run in enumerate(in_threads(ranks, one)):
        each = 4 // ranks
        for mine, whole in zip(run.cache.layers, want.cache.layers, strict=True):
            heads = [whole.head(g) for g in range(rank * each, (rank + 1) * each)]
            assert torch.equal(mine.positions, torch.cat([x[2] for x in heads]))
            assert torch.equal(mine.keys, torch.cat([x[0] for x in heads]))


CODED = {"quota": "pyramid", "precision": {"name": "uniform", "bits": 4}}


@pytest.mark.parametrize(("fields", "base", "reason"), [
    ({}, "gracekv", "it does more than choose among single tokens"),
    ({}, "cam", "it does more than choose"), ({}, "fullkv", "it keeps everything"),
    ({"value": "multi_hop"}, "snapkv", r"'multi_hop' \(value\) compare layers"),
    ({"value": "kvzip_two_pass"}, "snapkv", "the model runs once more"),
    ({"value": "draft_attention"}, "snapkv", "the model runs once more"),
    ({"quota": "density"}, "h2o", r"'density' \(quota\) compare layers"),
    ({"value": Late()}, "snapkv", "reads the decoder's output, which comes last"),
    ({"sensitivity": "output_projection"}, "snapkv", r"'output_projection' \(sensitivity\)"),
    ({"value": {"name": "replay", "likely_layers": 0}}, "snapkv", r"'replay' \(value\)"),
    (CODED, "snapkv", "quotas depend on how many entries the bytes buy"),
])  # fmt: skip
def test_what_needs_all_layers_says_why(fields, base, reason):
    own = isinstance(fields.get("value"), Scorer)
    pipeline = Pipeline.from_dict({} if own else fields, base=base)
    pipeline = dataclasses.replace(pipeline, **fields) if own else pipeline
    prefill = synthetic_prefill(context=200, dim=32, dtype=torch.bfloat16)
    assert re.search(reason, pipeline.holds_all(pipeline.plan(prefill, Budget.ratio(4)), 128))


@pytest.mark.parametrize(("got", "change"), [
    (r"torch.int64 \[2, 38\]", Tensor.long),
    (r"torch.float32 \[2, 37\]", lambda scores: scores[:, 1:]),
    (r"torch.float32 \[38\]", lambda scores: scores[0]),
    ("NoneType", lambda scores: None),
    ("ndarray", Tensor.numpy),
])  # fmt: skip
def test_a_scorer_that_returns_something_else_is_named(monkeypatch, got, change):
    layer, prefill = Tied.layer, synthetic_prefill(context=50)
    run = dataclasses.replace(Pipeline.named("snapkv"), value=Tied()).run
    monkeypatch.setattr(Tied, "layer", lambda *given: layer(*given).requires_grad_())
    run(prefill, Budget.ratio(4))
    monkeypatch.setattr(Tied, "layer", lambda *given: change(layer(*given)))
    wanted = rf"Tied\.layer must return .* \[G, N\] = \[2, 38\] for layer 0; got {got}"
    with pytest.raises(ShapeError, match=wanted):
        run(prefill, Budget.ratio(4))


@pytest.mark.parametrize(("stage", "change", "message"), [
    ("segment", lambda x: Partition(x.bounds[1:]), r"cover Region.*end=76\); got Region"),
    ("value", lambda x: dataclasses.replace(x, scores=x.scores[:1]), r"2, 72\]; got \[1, 2"),
    ("sensitivity", lambda x: x[:, :1], r"\[2, 2\]; got \[2, 1\]"),
])  # fmt: skip
def test_results_of_another_size_are_refused(monkeypatch, stage, change, message):
    pipeline = Pipeline.named("gracekv")
    strategy = type(getattr(pipeline, stage))
    real = strategy.__call__
    monkeypatch.setattr(strategy, "__call__", lambda *given: change(real(*given)))
    with pytest.raises(ShapeError, match=message):
        pipeline.run(synthetic_prefill(), Budget.ratio(4))
