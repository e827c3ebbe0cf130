"""R-KV against its public code, rewritten as loops over single numbers."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gracekv.decode import RKV
from support.held_layers import held_layer


def plain_scores(queries, keys, window, kernel, share, threshold):
    """Scores [N - window] of one KV head, and how far similarities are from the threshold.

    Args:
        queries: [n][Q][d], already scaled; only the last `window` of them count.
        keys: [N][d].
        window: last tokens, which are not scored.
        kernel: size of the pooling kernel.
        share: lambda.
        threshold: similarity threshold.
    """
    count, past = len(keys), len(keys) - window

    def dot(a, b):
        return math.fsum(x * y for x, y in zip(a, b, strict=True))

    # Importance: the largest logit of a group, a softmax over the past, a mean over the window.
    importance = [0.0] * past
    for q in range(-window, 0):
        logits = [max(dot(head[q], key) for head in queries) for key in keys[:past]]
        total = math.fsum(math.exp(x) for x in logits)
        for place, logit in enumerate(logits):
            importance[place] += math.exp(logit) / total / window
    reach = kernel // 2
    pooled = [max(importance[max(0, t - reach) : t + reach + 1]) for t in range(past)]

    # Redundancy: cosines of keys; in each row, the last one above the threshold is ignored, or the
    # first if there is none.
    lengths = [math.sqrt(dot(key, key)) + 1e-8 for key in keys]
    cosines = [
        [0.0 if i == j else dot(keys[i], keys[j]) / lengths[i] / lengths[j] for j in range(count)]
        for i in range(count)
    ]
    margin = min(abs(x - threshold) for row in cosines for x in row)
    for row in cosines:
        row[max((j for j in range(count) if row[j] > threshold), default=0)] = 0.0
    means = [math.fsum(row[j] for row in cosines) / count for j in range(count)]
    total = math.fsum(math.exp(x) for x in means)
    scores = [share * pooled[t] - (1 - share) * math.exp(means[t]) / total for t in range(past)]
    return torch.tensor(scores, dtype=torch.float64), margin


def alike(seed, **options):
    """A layer in which some keys are nearly the same."""
    held = held_layer(seed, packed=(14, 9), tail=10, **options)
    rng = torch.Generator().manual_seed(seed)
    pattern = torch.randn(4, held.keys.shape[2], generator=rng)
    held.keys.mul_(0.5).add_(pattern[torch.randint(4, held.positions.shape, generator=rng)])
    return held


@pytest.mark.parametrize("fields", [
    {}, {"queries": 3, "kernel": 1}, {"share": 1.0, "kernel": 5}, {"share": 0.0},
    {"threshold": 0.8},
])  # fmt: skip
@given(seed=st.integers(0, 2**20))
def test_scores_are_those_of_the_public_code(fields, seed):
    strategy, held = RKV(**fields), alike(seed, queries=10, group=3)
    scores, window = strategy.scores(held), strategy.queries
    for g, used in enumerate(held.used):
        want, margin = plain_scores(
            held.asked[g].tolist(), held.keys[g, used].tolist(), window, strategy.kernel,
            strategy.share, strategy.threshold,
        )  # fmt: skip
        assume(margin > 1e-5)
        got = scores[g, used]
        torch.testing.assert_close(got[:-window], want, rtol=1e-4, atol=1e-7)
        # The window stays: no score of the past reaches the window's.
        assert got[-window:].min() > got[:-window].max()
