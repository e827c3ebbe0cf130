"""Mixtures of scores, value norms, mean attention and drafts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv import Budget, Pipeline
from gracekv.errors import ConfigError
from gracekv.prefill import Needs, Region
from gracekv.testing import synthetic_prefill
from gracekv.value import (
    SCORERS,
    BlockReplay,
    ColumnSums,
    DraftAttention,
    KVzipTwoPass,
    MeanAttention,
    Mixture,
    ReadAhead,
    ValueNorm,
    reference,
)
from gracekv.value.column_sums import ReceivedAttention
from gracekv.value.draft_attention import Draft
from gracekv.value.mixture import combine_scores

REGION = Region(4, 36)


def small(seed=0, context=40):
    return synthetic_prefill(dim=8, context=context, seed=seed)


RULES = [
    ("sum", lambda a, b: 0.25 * a + 0.75 * b),
    ("rms", lambda a, b: (0.25 * a**2 + 0.75 * b**2).sqrt()),
    ("geometric", lambda a, b: a**0.25 * b**0.75),
]


@pytest.mark.parametrize(("rule", "want"), RULES)
def test_rules(rule, want):
    prefill, scorers = small(), (ReadAhead(), MeanAttention())
    a, b = (scorer(prefill, REGION).scores.double() for scorer in scorers)
    got = Mixture(scorers, (1.0, 3.0), rule)(prefill, REGION).scores
    torch.testing.assert_close(got.double(), want(a, b), rtol=1e-5, atol=1e-9)


def test_weights_default_to_equal_and_survive_plain_data():
    prefill, scorers = small(), (ReadAhead(), MeanAttention())
    even, twos = Mixture(scorers), Mixture(scorers, (2.0, 2.0))
    assert torch.equal(even(prefill, REGION).scores, twos(prefill, REGION).scores)
    assert torch.equal(combine_scores([-torch.ones(2)], (1.0,), "rms"), torch.ones(2))
    nested = Mixture((even, SCORERS.build("recency")), (1.0, 0.5), "rms")
    assert SCORERS.parse(nested.to_dict()) == nested


def test_needs_what_its_scorers_need():
    both = Mixture((SCORERS.build("window_attention"), ColumnSums()))
    assert both.needs() == Needs(last_queries=32, observers=frozenset({ReceivedAttention()}))
    assert ValueNorm(both).needs() == both.needs()


@pytest.mark.parametrize("fields", [{"scorers": ()}, {"weights": (1.0,)}, {"weights": (1.0, 0.0)}])
def test_refuses(fields):
    with pytest.raises(ConfigError, match="Mixture"):
        Mixture(**fields)


def test_value_norm_multiplies_by_the_length_of_values():
    prefill = small()
    plain, weighted = ReadAhead()(prefill, REGION), ValueNorm()(prefill, REGION)
    norms = torch.stack(prefill.values)[:, :, 4:36].norm(dim=-1)
    torch.testing.assert_close(weighted.scores, plain.scores * norms)


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("relative", [0.0, 0.5, 1.0])
def test_relative_norms_are_those_of_their_layer(relative, power):
    prefill = small()
    prefill.values[1][:] *= 100.0
    plain = ReadAhead()(prefill, REGION).scores
    got = ValueNorm(relative=relative, power=power)(prefill, REGION).scores
    for layer, value in enumerate(prefill.values):
        norms = value[:, REGION.start : REGION.end].norm(dim=-1)
        want = plain[layer] * (norms / norms.mean() ** relative) ** power
        torch.testing.assert_close(got[layer], want)
    if relative == 1.0:  # The layer's scale is gone.
        same = ValueNorm(relative=1.0, power=power)(small(), REGION).scores
        torch.testing.assert_close(same, got)


def test_mean_attention_is_column_sums_over_the_prompt_length():
    prefill = small()
    want = ColumnSums()(prefill, REGION).scores / prefill.spans.length
    torch.testing.assert_close(MeanAttention()(prefill, REGION).scores, want, rtol=1e-4, atol=1e-7)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), queries=st.integers(1, 30))
def test_a_sample_of_queries_is_even_and_ends_with_the_last(seed, queries):
    prefill = small(seed)
    length = prefill.spans.length
    probes = [(i + 1) * length // queries - 1 for i in range(queries)]
    assert probes[-1] == length - 1
    assert len(set(probes)) == queries
    want = reference.group_sums(prefill, dict.fromkeys(probes, 1 / queries / prefill.group), REGION)
    got = MeanAttention(queries)(prefill, REGION).scores
    torch.testing.assert_close(got.double(), want, rtol=5e-5, atol=1e-7)


def test_draft_attention_is_the_mean_of_the_first_rows():
    prefill = small()
    got = DraftAttention(3)(prefill, REGION).scores
    torch.testing.assert_close(got, prefill.observation(Draft(64))[:, :, :3, :32].mean(2))
    everything = DraftAttention(50)(prefill, REGION).scores
    torch.testing.assert_close(everything, prefill.observation(Draft(64))[..., :32].mean(2))
    assert DraftAttention(3).needs() == Needs.observed(Draft(3))


def test_draft_attention_needs_a_token_and_mean_attention_a_query():
    with pytest.raises(ConfigError, match="max_tokens"):
        DraftAttention(0)
    with pytest.raises(ConfigError, match="max_queries"):
        MeanAttention(0)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_two_passes_want_a_token_in_both_and_a_little_in_the_second(seed):
    prefill, budget = small(seed, context=200), Budget.ratio(8)
    run = Pipeline.named("gracekv-agnostic-two-pass").run(prefill, budget)
    region = prefill.spans.region(run.plan.recent)
    passes = BlockReplay(), KVzipTwoPass(mean_power=3)
    first, second = (scorer(prefill, region).scores.double() for scorer in passes)
    norms = torch.stack(prefill.values)[:, :, region.start : region.end].norm(dim=-1).double()
    norms = norms / norms.mean(dim=(1, 2), keepdim=True).sqrt()
    both = first.pow(0.75) * second.pow(0.25)
    want = (0.95 * both.square() + 0.05 * second.square()).sqrt() * norms.sqrt()
    torch.testing.assert_close(run.relevance.scores.double(), want, rtol=1e-4, atol=1e-9)
