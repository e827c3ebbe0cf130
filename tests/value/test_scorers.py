"""Guarantees of every registered scorer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gracekv
from gracekv import Pipeline
from gracekv.errors import ConfigError, MissingCaptureError, NonFiniteError
from gracekv.prefill import Needs
from gracekv.testing import contracts, synthetic_prefill
from gracekv.testing.models import tiny_llama
from gracekv.value import SCORERS, OutputProjection, Recency, reference
from gracekv.value.base import mean_seed_scores
from gracekv.value.critical import WrittenNorms
from gracekv.value.draft_attention import Draft
from gracekv.value.kvzip_two_pass import Reconstruction
from gracekv.value.repeated_attention import RepeatedQueries
from support.covering import cases
from support.draws import DTYPES, SEEDS, bools, ints, some


@pytest.mark.parametrize("name", list(SCORERS))
@settings(max_examples=cases(6, 15))
@given(seed=SEEDS, context=ints(1, 80), recent=ints(0, 16), dtype=DTYPES)
def test_scores_are_finite_non_negative_float32_and_repeatable(name, seed, context, recent, dtype):
    prefill = synthetic_prefill(layers=3, dim=8, context=context, seed=seed, dtype=dtype)
    region = prefill.spans.region(min(recent, context - 1))
    contracts.check_scorer(SCORERS.build(name), prefill, region)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("score", "error"), [(-1.0, ConfigError), (torch.nan, NonFiniteError)])
def test_scores_that_cannot_be_ranked_are_refused(monkeypatch, stream, score, error):
    key_norm = SCORERS.get("key_norm")
    monkeypatch.setattr(key_norm, "layer", lambda *x: torch.full((2, x[2].length), score))
    # The paper's trees get all layers, SnapKV one by one.
    pipeline = Pipeline.from_dict({"value": "key_norm"}, base="snapkv" if stream else "gracekv")
    prompt, how = gracekv.Prompt.from_ids(range(60), (2, 50)), gracekv.CaptureOptions(stream=stream)
    with pytest.raises(error, match=r"1 / norm instead of -norm|hold NaN"):
        gracekv.compress(tiny_llama(), prompt, ratio=4, pipeline=pipeline, capture=how)


def test_seed_scores_are_the_normalised_mean_over_heads():
    tokens = torch.tensor([[[1.0, 0.0, 3.0]], [[1.0, 4.0, 1.0]]])
    torch.testing.assert_close(mean_seed_scores(tokens), torch.tensor([0.2, 0.4, 0.4]))
    assert not mean_seed_scores(torch.zeros(1, 1, 3)).any()


@given(seed=SEEDS, layers=ints(1, 4), kv_heads=ints(1, 3), group=ints(1, 3), question=ints(0, 40))
def test_output_projection_equals_the_reference(**shape):
    prefill = synthetic_prefill(dim=4, context=8, **shape)
    slow = reference.output_projection(OutputProjection(), prefill)
    torch.testing.assert_close(OutputProjection()(prefill).double(), slow, rtol=1e-5, atol=0)


def test_a_scorer_that_may_wrap_another_has_no_part_without_it():
    optional = type("Optional", (Recency,), {"scorer": None})
    assert optional().parts == ()
    assert optional().needs() == Needs()


# Drawn fields, tokens of question and tail, and the relative and absolute tolerance of float32
# sums against the reference.
REFERENCES = {
    "column_sums": ((), (3, 1), 5e-5, 1e-6),
    "window_attention": (
        (ints(1, 12), some(["max", "avg", "none"]), some([1, 3, 7])), (4, 2), 5e-5, 1e-7
    ),
    "read_ahead": (
        (ints(0, 2), st.just(4), ints(1, 30), some([1.0, 2.0]), some([0.0, 0.02, 1.0])),
        (3, 2), 5e-5, 1e-7,
    ),
    "expected_attention": (
        (ints(1, 12), st.just(4), bools(), some([0.0, 0.01])), (9, 3), 2e-4, 1e-6
    ),
    "block_replay": (
        (ints(1, 26), some([1.0, 2.0, 3.0]), ints(0, 26), some([0.0, 0.3])), (3, 1), 2e-4, 1e-6
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=15)
@given(
    data=st.data(), recent=ints(0, 4), seed=SEEDS, kv_heads=ints(1, 2), group=ints(1, 3),
    prefix=ints(0, 6), context=ints(1, 30), dtype=DTYPES,
)  # fmt: skip
def test_scores_equal_the_reference(name, data, recent, context, **sizes):
    fields, (question, tail), rtol, atol = REFERENCES[name]
    scorer = data.draw(st.builds(SCORERS.get(name), *fields))
    prefill = synthetic_prefill(dim=8, context=context, question=question, tail=tail, **sizes)
    # With read-ahead, the region ends behind the context, so it includes probes.
    region = prefill.spans.region(-2 if name == "read_ahead" else min(recent, context - 1))
    given = (prefill, region) if name == "column_sums" else (scorer, prefill, region)
    got, want = scorer(prefill, region).scores.double(), getattr(reference, name)(*given)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@given(
    prefix=ints(0, 6), context=ints(2, 40), recent=ints(0, 1), sinks=ints(0, 6), kept=ints(1, 40)
)
def test_the_best_tokens_are_the_free_sinks_and_the_latest(prefix, context, recent, sinks, kept):
    prefill = synthetic_prefill(dim=4, prefix=prefix, context=context)
    region = prefill.spans.region(recent)
    scores = Recency(sinks)(prefill, region).scores
    kept = min(kept, region.length)
    best = scores.argsort(descending=True, stable=True)[..., :kept].sort().values + region.start
    # The prefix already holds the prompt's first tokens.
    first = [t for t in range(sinks) if region.start <= t < region.end][:kept]
    rest = [t for t in range(region.start, region.end) if t not in first]
    assert bool((best == torch.tensor(first + rest[len(rest) - (kept - len(first)) :])).all())


def test_scores_stay_distinct_and_sum_to_one_over_a_long_context():
    prefill = synthetic_prefill(layers=1, kv_heads=1, dim=2, prefix=0, context=50_000)
    scores = Recency()(prefill, prefill.spans.region(0))
    row = scores.scores[0, 0]
    assert len(row.unique()) == len(row)
    assert bool((row[4:].diff() > 0).all())
    torch.testing.assert_close(row.sum(), torch.tensor(1.0))
    torch.testing.assert_close(scores.seed_scores, row)


@pytest.mark.parametrize("name", ["kvzip_two_pass", "expected_attention"])
def test_sinks_in_the_region_outrank_everything(name):
    prefill = synthetic_prefill(context=40, prefix=1)
    scorers = SCORERS.build(name), SCORERS.build(name, sinks=0)
    sinks, plain = (scorer(prefill, prefill.spans.region(7)).scores for scorer in scorers)
    assert bool((sinks[..., :3] > sinks[..., 3:].amax()).all())
    assert not bool((plain[..., :3] > plain[..., 3:].amax()).all())
    if name == "kvzip_two_pass":
        assert torch.equal(sinks[..., 3:], plain[..., 3:])
        assert torch.equal(plain, prefill.observation(Reconstruction())[..., :33])


MISSING = [
    ("critical", WrittenNorms),
    ("defensive", WrittenNorms),
    ("draft_attention", Draft),
    ("kvzip_two_pass", Reconstruction),
    ("repeated_attention", RepeatedQueries),
]


@pytest.mark.parametrize(("name", "missing"), MISSING)
def test_what_was_not_observed_is_named(name, missing):
    prefill = synthetic_prefill().without(missing)
    with pytest.raises(MissingCaptureError, match=missing.__name__):
        SCORERS.build(name)(prefill, prefill.spans.region(4))
