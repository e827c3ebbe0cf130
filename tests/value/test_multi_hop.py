"""The paper's value flow."""

import pytest
import torch
from hypothesis import given

from gracekv.errors import ConfigError, PromptError
from gracekv.prefill import Needs, PromptSpans, Region
from gracekv.testing import synthetic_prefill
from gracekv.value import MultiHop, ReadAhead, reference
from gracekv.value.multi_hop import select_seeds
from support.draws import DTYPES, SEEDS, ints, lists, some

# float32 against float64 over a chain of a few hundred additions and divisions; the same for
# bfloat16 captures, whose rounded tensors both sides convert before any arithmetic.
CLOSE = {"rtol": 1e-4, "atol": 1e-7}


def small(seed=0, context=40, **shape):
    shape = {"layers": 3, "dim": 8, "prefix": 2, "question": 4, "tail": 2} | shape
    return synthetic_prefill(context=context, seed=seed, **shape)


@given(
    seed=SEEDS, layers=ints(1, 4), kv_heads=ints(1, 2), group=ints(1, 3), context=ints(6, 40),
    question=ints(0, 4), recent=ints(0, 5), hops=ints(0, 3), max_seeds=ints(1, 8),
    seed_mass=some([0.3, 0.9]), decay=some([0.0, 0.7, 1.0]), dtype=DTYPES,
)  # fmt: skip
def test_equals_the_reference(seed, context, recent, hops, max_seeds, seed_mass, decay, **shape):
    prefill = small(seed, context, **shape)
    region = prefill.spans.region(recent)
    scorer = MultiHop(
        question_probes=3, tail_probes=3, hops=hops, max_seeds=max_seeds, seed_mass=seed_mass,
        decay=decay,
    )  # fmt: skip
    fast, slow = scorer(prefill, region), reference.multi_hop(scorer, prefill, region)
    torch.testing.assert_close(fast.scores.double(), slow.scores, **CLOSE)
    torch.testing.assert_close(fast.seed_scores.double(), slow.seed_scores, **CLOSE)


def test_relevance_is_direct_relevance_where_every_token_is_a_seed_already():
    prefill, region = small(context=6), Region(2, 4)
    everything = MultiHop(seed_mass=1.0)(prefill, region)
    assert torch.equal(everything.scores, MultiHop(hops=0)(prefill, region).scores)


def test_relevance_is_direct_relevance_where_the_hops_discover_nothing():
    # Here the only seed is the region's first token, which sees only itself in the region.
    prefill, region = small(1_000_001, 100), Region(2, 80)
    direct = MultiHop(hops=0)(prefill, region)
    assert select_seeds(direct.seed_scores, 0.9, 1).tolist() == [0]
    assert torch.equal(MultiHop(max_seeds=1)(prefill, region).scores, direct.scores)


def test_a_head_that_ignores_the_region_adds_nothing_but_the_hops():
    prefill, region = small(), Region(2, 30)
    prefill.keys[0][0, 0] = 1e4 * prefill.queries[0][:2].sum(dim=(0, 1))
    prefill.queries[0][:2] = prefill.keys[0][0, 0]
    scores = MultiHop()(prefill, region).scores
    torch.testing.assert_close(scores[0, 0].sum(), torch.tensor(0.3))
    torch.testing.assert_close(scores[0, 1].sum(), torch.tensor(1.0))


@given(
    scores=lists(ints(0, 5), min_size=1, max_size=12),
    mass=some([0.1, 0.5, 0.9, 1.0]),
    limit=ints(1, 12),
)
def test_seeds_equal_the_reference(scores, mass, limit):
    # Small integers tie often, and their sums are exact on both sides.
    chosen = select_seeds(torch.tensor(scores, dtype=torch.float32), mass, limit)
    assert chosen.tolist() == sorted(reference.seeds(scores, mass, limit))


@pytest.mark.parametrize("scorer", [MultiHop, ReadAhead])
def test_refuses_to_have_no_probes(scorer):
    with pytest.raises(ConfigError, match=rf"{scorer.__name__}.* takes at least one"):
        scorer(question_probes=0, tail_probes=0)
    prefill = small(question=0)
    assert prefill.spans == PromptSpans(2, 42, 42, 44)
    with pytest.raises(PromptError, match="Set tail_probes >= 1"):
        scorer(question_probes=3, tail_probes=0)(prefill, Region(2, 30))


NEEDED = [
    (MultiHop(), Needs(later_queries=True, last_queries=16)),
    (MultiHop(hops=0), Needs(last_queries=16)),
    (MultiHop(lambda_graph=0.0), Needs(last_queries=16)),
    (MultiHop(hops=0, question_probes=33), Needs(question_queries=33, last_queries=16)),
    (MultiHop(hops=0, tail_probes=17), Needs(last_queries=17)),
]


@pytest.mark.parametrize(("scorer", "needed"), NEEDED)
def test_declares_what_it_reads(scorer, needed):
    assert scorer.needs() == needed
