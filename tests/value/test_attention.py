"""Attention probabilities and their sums."""

import pytest
import torch
from hypothesis import given

from gracekv.errors import MissingCaptureError
from gracekv.prefill import Region
from gracekv.testing import synthetic_prefill
from gracekv.value import reference
from gracekv.value.base import attention_sums
from gracekv.value.scissorhands import attention_probabilities
from support.draws import DTYPES, SEEDS, bools, ints, lists, some, tuples
from support.lean_prefills import without_context_queries

# float32 sums of a few dozen terms against float64. bfloat16 inputs need no more: both sides
# convert the same rounded tensors before any arithmetic.
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


def small(seed, **options):
    sizes = {"dim": 8, "prefix": 3, "context": 24, "question": 5, "tail": 2}
    return synthetic_prefill(seed=seed, **sizes, **options)


@given(
    seed=SEEDS,
    kv_heads=ints(1, 3),
    group=ints(1, 3),
    dtype=DTYPES,
    probes=lists(ints(0, 33), min_size=1, max_size=5, unique=True),
)
def test_probabilities_match_the_definition(seed, kv_heads, group, dtype, probes):
    prefill = small(seed, kv_heads=kv_heads, group=group, dtype=dtype)
    fast = attention_probabilities(prefill.layer(1), probes)
    assert fast.dtype == torch.float32
    assert fast.shape == (kv_heads * group, len(probes), max(probes) + 1)
    for head in range(prefill.query_heads):
        for i, probe in enumerate(probes):
            slow = reference.attention_probability(prefill, 1, head, probe)
            torch.testing.assert_close(
                fast[head, i, : probe + 1], torch.tensor(slow, dtype=torch.float32), **CLOSE
            )
            assert not fast[head, i, probe + 1 :].any()


@given(
    seed=SEEDS,
    bounds=tuples(ints(0, 33), ints(0, 33)).map(sorted),
    probes=lists(ints(0, 33), min_size=1, max_size=6, unique=True),
    power=some([1.0, 2.0, 3.0]),
    maximum=bools(),
)
def test_attention_sums_match_the_definition(seed, bounds, probes, power, maximum):
    prefill, region = small(seed), Region(bounds[0], bounds[1] + 1)
    weights = torch.rand(len(probes), generator=torch.Generator().manual_seed(seed))
    fast = attention_sums(prefill.layer(0), probes, region, weights, power=power, maximum=maximum)
    for head in range(prefill.query_heads):
        rows = torch.zeros(len(probes), prefill.spans.length, dtype=torch.float64)
        for i, probe in enumerate(probes):
            row = torch.tensor(reference.attention_probability(prefill, 0, head, probe))
            rows[i, : probe + 1] = weights[i] * row.double() ** power
        slow = (rows.amax(0) if maximum else rows.sum(0))[region.start : region.end]
        torch.testing.assert_close(fast[head], slow.float(), **CLOSE)


def test_large_logits_do_not_overflow():
    prefill = small(0)
    for queries in prefill.queries:
        queries.mul_(1e4)
    rows = attention_probabilities(prefill.layer(0), [20, 33])
    torch.testing.assert_close(rows.sum(-1), torch.ones(4, 2))


def test_names_the_positions_that_were_not_captured():
    prefill = without_context_queries(small(0))
    with pytest.raises(MissingCaptureError, match=r"\[7\]"):
        attention_sums(prefill.layer(0), [7, 33], Region(3, 20))
