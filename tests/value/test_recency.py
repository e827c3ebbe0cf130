"""StreamingLLM's score."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.testing import synthetic_prefill
from gracekv.value import Recency


@given(
    prefix=st.integers(0, 6),
    context=st.integers(2, 40),
    recent=st.integers(0, 1),
    sinks=st.integers(0, 6),
    kept=st.integers(1, 40),
)
def test_the_best_tokens_are_the_free_sinks_and_the_latest(prefix, context, recent, sinks, kept):
    prefill = synthetic_prefill(dim=4, prefix=prefix, context=context)
    region = prefill.spans.region(recent)
    scores = Recency(sinks)(prefill, region).scores
    kept = min(kept, region.length)
    best = scores.argsort(descending=True, stable=True)[..., :kept].sort().values + region.start
    # The prefix holds the prompt's first tokens already.
    first = [t for t in range(sinks) if region.start <= t < region.end][:kept]
    rest = [t for t in range(region.start, region.end) if t not in first]
    expected = first + rest[len(rest) - (kept - len(first)) :]
    assert bool((best == torch.tensor(expected)).all())


def test_scores_stay_distinct_and_sum_to_one_over_a_long_context():
    prefill = synthetic_prefill(layers=1, kv_heads=1, dim=2, prefix=0, context=50_000)
    scores = Recency()(prefill, prefill.spans.region(0))
    row = scores.scores[0, 0]
    assert len(row.unique()) == len(row)
    assert bool((row[4:].diff() > 0).all())
    torch.testing.assert_close(row.sum(), torch.tensor(1.0))
    torch.testing.assert_close(scores.seed_scores, row)
