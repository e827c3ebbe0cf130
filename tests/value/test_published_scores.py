"""Scores of keys, lags, leverage, the last query and two stages: each against plain float64."""

import dataclasses
import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings

from gracekv.errors import MissingCaptureError
from gracekv.prefill import Needs, Region
from gracekv.testing import synthetic_prefill
from gracekv.value import SCORERS, Compactor, Critical, KeyNorm
from gracekv.value.critical import WrittenNorms, merged_order
from gracekv.value.reference import attention_probability
from support.draws import DTYPES, SEEDS, ints, some
from support.lean_prefills import without_context_queries

BLIND = ("key_norm", "key_difference", "lag_relative", "compactor", "expected_attention")


def drawn(seed, context=60, dtype=torch.float32):
    sizes = {"dim": 8, "prefix": 3, "context": context, "question": 5}
    return synthetic_prefill(seed=seed, dtype=dtype, **sizes)


def heads(prefill, tensors):
    """float64 [T, d] of every (layer, KV head)."""
    return [tensors[layer][head].double() for layer in range(2) for head in range(2)]


def key_norm(prefill):
    return [[1 / math.sqrt(float(k @ k)) for k in keys] for keys in heads(prefill, prefill.keys)]


def key_difference(prefill):
    found, end = [], prefill.spans.context_end
    for keys in heads(prefill, prefill.keys):
        unit = [k / math.sqrt(float(k @ k)) for k in keys]
        mean = sum(unit[:end]) / end
        found.append([1 - float(k @ mean) / math.sqrt(float(mean @ mean)) for k in unit])
    return found


def last_query(prefill):
    last = prefill.spans.length - 1
    found = []
    for layer in range(2):
        rows = [attention_probability(prefill, layer, head, last) for head in range(4)]
        mean = [sum(column) / 4 for column in zip(*rows, strict=True)]
        found += [mean, mean]
    return found


def lag_relative(prefill, sinks=4, lag=9):
    end, found = prefill.spans.context_end, []
    both = (heads(prefill, states) for states in (prefill.keys, prefill.values))
    for keys, values in zip(*both, strict=True):
        scores = [3.0] * sinks + [1 + (i + 1) / (end - sinks) for i in range(end - sinks)]
        for part in range((end - sinks) // lag - 1):
            start = sinks + part * lag
            shares = torch.zeros(lag, dtype=torch.float64)
            for states in (keys, values):
                spread = []
                for t in range(start, start + lag):
                    after = states[start + lag : start + 2 * lag]
                    low, high = after.min(0).values, after.max(0).values
                    scaled = ((states[t] - low) / (high - low)).tolist()
                    spread.append(statistics.stdev(scaled))
                shares += torch.tensor(spread).softmax(0) / 2
            for place, i in enumerate(sorted(range(lag), key=lambda i: (-float(shares[i]), i))):
                scores[start + i] = (lag - 1 - place) / lag
        found.append(scores)
    return found


def compactor(prefill, sinks=8, chunk=13, blending=0.5, ridge=1e-2):
    end, found = prefill.spans.context_end, []
    at = list(range(sinks, end))
    for layer in range(2):
        leverage, drawn_to = [], []
        for head in range(2):
            keys, rope = prefill.keys[layer][head].float(), prefill.rope
            plain = torch.stack([rope.unrotate(keys[t], torch.tensor(t)) for t in at]).double()
            plain = plain - plain.mean(0)
            inverse = torch.linalg.inv(plain.T @ plain + ridge * torch.eye(8, dtype=torch.float64))
            leverage.append([float(k @ inverse @ k) for k in plain])
            sums = [0.0] * len(at)
            for first in range(sinks, end, chunk):
                inside = range(first, min(first + chunk, end))
                keys = prefill.keys[layer][head, inside.start : inside.stop].double()
                for query_head in (2 * head, 2 * head + 1):
                    for u in inside:
                        share = (keys @ prefill.queries[layer][query_head, u].double()).softmax(0)
                        for t in inside:
                            sums[t - sinks] += float(share[t - first]) / 2
            norms = prefill.values[layer][head, sinks:end].double().norm(dim=-1).tolist()
            weighed = [0.0] + [x * n for x, n in zip(sums, norms, strict=True)] + [0.0]
            drawn_to.append([sum(weighed[i : i + 3]) / 3 for i in range(len(at))])
        blend = torch.zeros(2, len(at), dtype=torch.float64)
        for scores, weight in ((leverage, blending), (drawn_to, 1.0)):
            flat = torch.tensor(scores, dtype=torch.float64)
            blend += weight * (flat - flat.mean()) / flat.std(correction=0)
        blend = blend - blend.min() + 1
        found += [[float(blend.max()) + 1] * sinks + row.tolist() for row in blend]
    return found


FIELDS = {"lag_relative": {"lag": 9}, "compactor": {"chunk_size": 13}}


@pytest.mark.parametrize("plain", [key_norm, key_difference, last_query, lag_relative, compactor])
@settings(max_examples=4)
# Contexts of three or more lags, and of less than two.
@given(seed=SEEDS, context=some([60, 16]), dtype=DTYPES)
def test_equals_the_reference(plain, seed, context, dtype):
    prefill, name = drawn(seed, context, dtype), plain.__name__
    region = prefill.spans.region(4)
    fast = SCORERS.build(name, **FIELDS.get(name, {}))(prefill, region).scores.double()
    whole = torch.tensor([row[: region.end] for row in plain(prefill)], dtype=torch.float64)
    slow = whole[:, region.start :].view(fast.shape)
    # Ranks inside a partition move by one place if two spreads nearly tie.
    margin = 1.01 / 9 if name == "lag_relative" else 1e-5
    torch.testing.assert_close(fast, slow, rtol=2e-4, atol=margin)


@pytest.mark.parametrize("name", BLIND)
def test_nothing_after_the_context_is_read(name):
    prefill = drawn(1)
    end, region = prefill.spans.context_end, prefill.spans.region(4)
    scorer = SCORERS.build(name)

    def spoiled(tensors):
        return tuple(torch.cat([x[:, :end], x[:, end:] * 0 + 7], dim=1) for x in tensors)

    changes = {field: spoiled(getattr(prefill, field)) for field in ("keys", "values", "queries")}
    other = scorer(dataclasses.replace(prefill, **changes), region).scores
    assert torch.equal(scorer(prefill, region).scores, other)


def test_compactor_scores_a_context_of_sinks():
    short = drawn(4, context=4)
    assert bool(Compactor()(short, short.spans.region(0)).scores.isfinite().all())


def test_compactor_computes_queries_again_in_chunks():
    assert Compactor().needs() == Needs(later_queries=True)
    with pytest.raises(MissingCaptureError, match="not captured"):
        Compactor()(without_context_queries(drawn(5)), Region(4, 40))


@given(seed=SEEDS, length=ints(1, 24), share=some([0.0, 0.3, 0.5, 1.0]))
def test_one_order_holds_the_two_stage_choice_of_every_budget(seed, length, share):
    draw = random.Random(seed)
    first, second = (draw.sample(range(length), length) for _ in range(2))
    merged = merged_order(first, second, share)
    for budget in range(1, length + 1):
        count = max(1, math.floor(share * budget)) if share > 0 else 0
        rest = [token for token in second if token not in first[:count]]
        assert set(merged[:budget]) == set(first[:count] + rest[: budget - count])


def test_critical_by_hand():
    prefill = drawn(6)
    region = prefill.spans.region(2)
    scores = Critical(KeyNorm(), first_stage=0.5, epsilon=0.1)(prefill, region).scores
    base = KeyNorm()(prefill, region).scores[1, 0].double()
    norms = prefill.observation(WrittenNorms())[1, 0, region.start : region.end].double()
    by_both = ((base + 0.1) * norms).argsort(descending=True).tolist()
    kept = set(base.argsort(descending=True).tolist()[:5])
    kept |= set([token for token in by_both if token not in kept][:6])
    assert set(scores[1, 0].topk(11).indices.tolist()) == kept
