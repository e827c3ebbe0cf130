"""Context queries moved to the end, against a plain reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.prefill import Region
from gracekv.testing import synthetic_prefill
from gracekv.value import ReadAhead, Replay, reference
from support.margins import assert_same_order


def small(**changes):
    sizes = {"layers": 2, "prefix": 2, "context": 20, "question": 3, "tail": 1}
    return synthetic_prefill(dim=8, **(sizes | changes))


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    group=st.integers(1, 3),
    queries=st.integers(2, 20),
    uniform_weight=st.sampled_from([0.0, 0.5, 1.0]),
    power=st.sampled_from([1.5, 2.0, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
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


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    queries=st.integers(2, 60),
    uniform_weight=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_queries_are_few_distinct_and_inside_and_their_weights_sum_to_one(
    seed, queries, uniform_weight
):
    prefill = small(context=40, seed=seed)
    region = prefill.spans.region(4)
    scorer = Replay(max_queries=queries, uniform_weight=uniform_weight)
    at, weights = scorer.select_queries(prefill.layer(1), region, {})
    assert len(at) == min(queries, 36)
    assert len(at.unique()) == len(at)
    assert region.start <= int(at.min())
    assert int(at.max()) < region.end
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    assert bool((weights >= 0).all())


@given(
    context=st.integers(20, 60), queries=st.integers(2, 40), share=st.sampled_from([0.0, 0.4, 0.9])
)
def test_a_longer_context_asks_more_queries(context, queries, share):
    prefill = small(context=context)
    region = prefill.spans.region(4)
    scorer = Replay(max_queries=queries, context_share=share)
    at, weights = scorer.select_queries(prefill.layer(1), region, {})
    most = max(queries, min(int(share * region.length), 2 * queries))
    assert len(at.unique()) == len(at) == min(region.length, most)
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    if share:
        assert float(weights.min()) > 0.4 / len(at)


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
