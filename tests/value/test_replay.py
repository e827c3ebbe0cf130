"""Context queries moved to the end, against a plain reference."""

import pytest
import torch
from hypothesis import given, settings

from gracekv.prefill import Region
from gracekv.value import ReadAhead, Replay, reference
from support.covering import LONG
from support.draws import DTYPES, SEEDS, ints, some
from support.lean_prefills import small
from support.margins import assert_same_order


@settings(max_examples=10)
@given(
    seed=SEEDS,
    group=ints(1, 3),
    queries=ints(2, 20),
    uniform_weight=some([0.0, 0.5, 1.0]),
    power=some([1.5, 2.0, 3.0]),
    dtype=DTYPES,
)
def test_equals_the_reference(seed, group, queries, uniform_weight, power, dtype):
    prefill = small(seed=seed, group=group, dtype=dtype)
    region = prefill.spans.region(2)
    scorer = Replay(uniform_weight=uniform_weight, max_queries=queries, mean_power=power)
    got, memory = scorer(prefill, region).scores, {}
    for layer in range(prefill.layers):
        at, weights = scorer.select_queries(prefill.layer(layer), region, memory)
        want = reference.replay(prefill, at, weights, region, power)[layer]
        torch.testing.assert_close(got[layer].double(), want, rtol=2e-4, atol=1e-7)


@settings(max_examples=220 if LONG else 40)
@given(
    seed=SEEDS,
    context=ints(20, 60),
    queries=ints(2, 60),
    uniform=some([0.0, 0.3, 0.5, 1.0]),
    share=some([0.0, 0.4, 0.9]),
)
def test_queries_are_distinct_and_more_in_a_longer_context(seed, context, queries, uniform, share):
    prefill = small(context=context, seed=seed)
    region = prefill.spans.region(4)
    scorer = Replay(max_queries=queries, uniform_weight=uniform, context_share=share)
    at, weights = scorer.select_queries(prefill.layer(1), region, {})
    more = min(int(share * region.length), 2 * queries) if uniform < 1 else 0
    assert len(at.unique()) == len(at) == min(region.length, max(queries, more))
    assert region.start <= int(at.min()) <= int(at.max()) < region.end
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    assert float(weights.min()) >= (0.8 * uniform / len(at) if share else 0)


def test_uniform_weights_do_not_read_the_question():
    prefill, region = small(), Region(2, 20)
    at, weights = Replay(uniform_weight=1.0).select_queries(prefill.layer(0), region, {})
    assert at.tolist() == list(range(2, 20))
    torch.testing.assert_close(weights, torch.full((18,), 1 / 18))


@pytest.mark.parametrize(
    ("likely_layers", "counted"),
    [(2, [(0, 1), (0, 2), (1, 3)]), (9, [(0, 1), (0, 2), (0, 3)]), (0, [(0, 3)] * 3)],
)
def test_likely_words_weigh_most(likely_layers, counted):
    prefill, region, memory = small(layers=3), Region(2, 20), {}
    query_scorer = ReadAhead(lookahead=3, max_weight=1.0)
    scorer = Replay(query_scorer, power=3.0, uniform_weight=0.0, likely_layers=likely_layers)
    assert scorer.compares_layers == (likely_layers == 0)
    if scorer.compares_layers:
        scorer.asks(prefill, region, memory)
    for layer, (first, last) in enumerate(counted):
        _, weights = scorer.select_queries(prefill.layer(layer), region, memory)
        likely = query_scorer(prefill, region).scores.amax(1)[first:last].mean(0)
        assert_same_order(weights.argsort(), likely.argsort(), likely)
        torch.testing.assert_close(weights, likely**3 / (likely**3).sum(), rtol=1e-4, atol=1e-7)
