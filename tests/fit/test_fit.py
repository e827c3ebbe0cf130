"""Fitted values and multiplicities, against least squares in float64."""

import dataclasses
from unittest.mock import patch

import pytest
import torch
from hypothesis import given

from gracekv.allocate import Budget
from gracekv.errors import NonFiniteError
from gracekv.fit import FITTERS, ReferenceQueries, Values, ValuesAndMass, reference
from gracekv.fit import values as fit_values
from gracekv.fit.attended import Reference, in_parts
from gracekv.fit.values import ridge
from gracekv.kernels.rope import Rope
from gracekv.pipeline import Pipeline
from gracekv.prefill.spans import ADDED
from gracekv.testing import synthetic_prefill
from gracekv.value import Replay
from support.draws import bools, ints, some
from support.fitting import fitted_cache

QUERIES = ReferenceQueries(Replay(max_queries=12), tail=3)


def compressed(recipe="gracekv-plus", ratio=3, fit="none", softcap=None, sinks=False, **sizes):
    sizes = {"layers": 2, "context": 40, "question": 3, "tail": 2, "dim": 8} | sizes
    prefill = synthetic_prefill(**sizes)
    if sinks:
        rows = torch.linspace(-2, 4, prefill.query_heads)
        prefill = dataclasses.replace(prefill, sink_logits=(rows, -rows))
    prefill = dataclasses.replace(prefill, softcap=softcap)
    pipeline = dataclasses.replace(Pipeline.named(recipe), fit=FITTERS.parse(fit))
    run = pipeline.run(prefill, Budget.ratio(ratio))
    return prefill, prefill.spans.region(run.plan.recent), run.cache


@given(
    seed=ints(0, 2**16), group=ints(1, 3), ratio=some([1.5, 3, 8]), trust=some([0.02, 0.3]),
    trust_read=some([0.0, 0.5]), recipe=some(["gracekv-plus", "gracekv"]), mass=some([None, 0.1]),
    softcap=some([None, 2.0]), sinks=bools(), tail_share=some([0.1, 0.4]),
    repeated=some([(0, 1.0, 9), (512, 1.0, 4096), (512, 0.3, 4096), (192, 1.0, 2048)]),
    by_score=bools(), rows=some([0, 256]),
)  # fmt: skip
def test_equals_least_squares_in_float64(
    seed, group, ratio, trust, trust_read, recipe, mass, softcap, sinks, tail_share, repeated,
    by_score, rows,
):  # fmt: skip
    repeat, share, chunk = repeated
    again_share = (1 - tail_share) * share * bool(repeat)
    queries = ReferenceQueries(QUERIES.replay, QUERIES.tail, tail_share, repeat, share, chunk)
    sizes = {"seed": seed, "group": group}
    prefill, region, cache = compressed(recipe, ratio, softcap=softcap, sinks=sinks, **sizes)
    torch.manual_seed(seed)
    scores = torch.rand(prefill.layers, prefill.kv_heads, region.length) ** 3
    scores = scores if by_score else [None] * prefill.layers
    kind, own = (Values, ()) if mass is None else (ValuesAndMass, (mass,))
    fitter = kind(queries, trust, trust_read, *own, by_score=by_score)
    with patch.object(fit_values, "_ROWS", rows):
        got = fitted_cache(fitter, prefill, region, cache, scores if by_score else None)
    memory = {}
    for number, packed in enumerate(cache.layers):
        chosen = queries(prefill.layer(number), region, memory)
        again = slice(len(chosen.positions), -QUERIES.tail)
        assert chosen.asked_at[again].eq(prefill.spans.context_end - 1).all()
        assert float(chosen.weights[again].sum()) == pytest.approx(again_share)
        for head in range(prefill.kv_heads):
            trusts = trust, trust_read, mass
            values, log_m = reference.fitted_head(
                prefill.layer(number), head, packed, region, chosen, *trusts, scores[number]
            )
            own = got.layers[number].head(head)
            torch.testing.assert_close(own[1].double(), values, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(own[3].double(), log_m, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("context", [30, 2100, 4090])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_in_parts_is_that_of_the_whole(context, softcap):
    """As a GPU reads all tokens; their number is not a multiple of the part size."""
    prefill = synthetic_prefill(layers=1, context=context, prefix=0, question=1, tail=1, dim=8)
    region = prefill.spans.region(0)
    prefill = prefill.with_queries(QUERIES.asks(prefill, region, {}))
    capture = dataclasses.replace(prefill, softcap=softcap).layer(0)
    whole = Reference.of(capture, queries := QUERIES(capture, region, {}))
    place = torch.arange(int(queries.asked_at.min()) + 1, capture.spans.length)
    unseen = place > queries.asked_at.repeat(capture.group)[:, None]
    got = [torch.full_like(x, torch.nan) for x in (whole.top, whole.total, whole.output)]
    in_parts(capture, whole.asked, unseen.expand(2, -1, -1), *got)
    torch.testing.assert_close(got, [whole.top, whole.total, whole.output], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["gracekv-plus", "gracekv-agnostic"])
def test_a_pipeline_hands_over_the_scores_that_chose(recipe):
    fit = {"name": "values", "by_score": True, "queries": {"tail": 4}}
    prefill, region, got = compressed(recipe, 3, fit, seed=6)
    pipeline = dataclasses.replace(Pipeline.named(recipe), fit=FITTERS.parse("none"))
    run = pipeline.run(prefill, Budget.ratio(3))
    wanted = fitted_cache(FITTERS.parse(fit), prefill, region, run.cache, run.relevance.scores)
    flat = fitted_cache(FITTERS.parse(fit), prefill, region, run.cache)
    for one, other, without in zip(got.layers, wanted.layers, flat.layers, strict=True):
        torch.testing.assert_close(one.values, other.values, rtol=1e-3, atol=1e-4)
        assert (one.values - without.values).abs().max() > 1e-3


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", sorted(set(FITTERS) - {"none"}))
def test_what_came_before_counts_as_a_prefix_does(name, sinks):
    """Earlier entries are summed up, and a head's padding, which no query sees, is left out."""
    prefill, region, _ = compressed(sinks=sinks, seed=4, prefix=6, dim=16)
    keys, queries = ([x.clone() for x in part] for part in (prefill.keys, prefill.queries))
    for layer in range(prefill.layers):
        queries[layer][..., -ADDED] = 1.0
        keys[layer][0, 0:2] = 0.0
        keys[layer][0, 0:2, -ADDED] = -1e4
    rope = Rope.none(prefill.spans.length, torch.device("cpu"))
    prefix = dataclasses.replace(prefill, keys=tuple(keys), queries=tuple(queries), rope=rope)
    cache = Pipeline.named("gracekv").run(prefix, Budget.ratio(3)).cache
    before = dataclasses.replace(prefix, spans=dataclasses.replace(prefix.spans, past=6))
    # Avoids cases in which rounding changes the fit: limits that are just met, and unconverged
    # steps of conjugate gradients.
    smooth = {"guard": 0.0, "value_cap": 10.0, "key_cap": 10.0, "penalty": 0.1}
    fitter = FITTERS.build(name, **(smooth if name == "regression" else {}))
    passage = tuple(x.where(x.positions >= 6) for x in cache.layers)
    whole = fitted_cache(fitter, prefix, region, cache)
    fitted = fitted_cache(fitter, before, region, dataclasses.replace(cache, layers=passage))
    for both, other in zip(whole.layers, fitted.layers, strict=True):
        one = both.where(both.positions >= 6)
        torch.testing.assert_close(other.values, one.values, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(other.keys, one.keys, rtol=1e-3, atol=1e-4)
        assert torch.equal(other.positions, one.positions)
        moved = (one.log_multiplicity, other.log_multiplicity)
        torch.testing.assert_close(*moved, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", sorted(set(FITTERS) - {"none"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_values_and_masses_of_the_region_change(name, dtype):
    prefill, region, cache = compressed(dtype=dtype, seed=3)
    fitted = fitted_cache(FITTERS.build(name), prefill, region, cache)
    for old, new in zip(cache.layers, fitted.layers, strict=True):
        free = (old.positions >= region.start) & (old.positions < region.end)
        assert torch.equal(old.keys[~free], new.keys[~free])
        assert name == "regression" or torch.equal(old.keys, new.keys)
        assert torch.equal(old.positions, new.positions)
        assert torch.equal(old.values[~free], new.values[~free])
        assert torch.equal(old.log_multiplicity[~free], new.log_multiplicity[~free])
        assert not torch.equal(old.values[free], new.values[free])
        assert new.values.dtype == dtype
        assert bool(new.values.isfinite().all())


def test_without_a_fit_the_cache_is_the_packed_one():
    prefill, region, cache = compressed(seed=1)
    same = fitted_cache(FITTERS.build("none"), prefill, region, cache)
    assert all(a is b for a, b in zip(same.layers, cache.layers, strict=True))
    assert Pipeline.named("gracekv").fit == FITTERS.build("none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_degenerate_heads_stay_finite(dtype):
    prefill, region, _ = compressed(seed=2, dtype=dtype)
    # Repeated keys, and keys that no query attends to.
    keys = [x.clone() for x in prefill.keys]
    keys[0][:, region.start : region.end] = keys[0][:, region.start : region.start + 1]
    keys[1][0] = 0.0
    last = prefill.queries_at(1, [prefill.spans.length - 1])[0]
    keys[1][0, region.start : region.end] = -1e4 * last
    # Near float16's largest number.
    values = tuple(6e4 * x.sign() for x in prefill.values)
    broken = dataclasses.replace(prefill, keys=tuple(keys), values=values)
    packed = Pipeline.named("gracekv-plus").run(broken, Budget.ratio(3)).cache
    for name in FITTERS:
        for layer in fitted_cache(FITTERS.build(name), broken, region, packed).layers:
            assert all(x.isfinite().all() for x in (layer.values, layer.log_multiplicity))


@given(rows=ints(1, 9), columns=ints(1, 9), seed=ints(0, 999))
def test_both_forms_of_the_ridge_problem_agree(rows, columns, seed):
    rng = torch.Generator().manual_seed(seed)
    a = torch.rand(2, rows, columns, generator=rng)
    b, w = torch.randn(2, rows, 3, generator=rng), torch.rand(rows, generator=rng)
    penalty = torch.rand(2, columns, generator=rng) + 0.1
    got = ridge(a, b, w, penalty.reciprocal())
    gram = a.double().mT @ (a * w[:, None]).double() + torch.diag_embed(penalty.double())
    want = torch.linalg.solve(gram, a.double().mT @ (b * w[:, None]).double())
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_a_fit_made_useless_are_refused(monkeypatch, bad):
    spoil = lambda _, own, *rest: dataclasses.replace(own, values=own.values * bad)  # noqa: E731
    monkeypatch.setattr(Values, "layer", spoil)
    with pytest.raises(NonFiniteError, match="Fitted values hold NaN"):
        compressed("snapkv", fit="values")
