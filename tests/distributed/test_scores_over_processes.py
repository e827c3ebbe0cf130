"""Scores and sensitivities of some heads equal those of one process that holds all heads."""

import pytest
import torch

from gracekv.fit.base import ReferenceQueries
from gracekv.segment.curvature import BlockInput
from gracekv.segment.surprisal import Surprisal
from gracekv.testing.prefills import synthetic_prefill
from gracekv.value import SCORERS, SENSITIVITIES, Replay
from support.thread_exchange import in_threads, part_of

PREFILL = synthetic_prefill(kv_heads=4)
REGION = PREFILL.spans.region(4)
# Their scores are ranks, which rounding may swap.
RANKS = {"scissorhands", "lag_relative", "matching_pursuit"}
CASES = {name: {} for name in SCORERS if SCORERS.get(name).works_sharded and name not in RANKS}
CASES["value_norm"] = {"relative": 0.5}
CASES["replay"] = {"max_queries": 16}


def part(shard):
    """The capture of one process."""
    observed = {
        x: seen if isinstance(x, BlockInput | Surprisal) else shard.own_heads(seen, 1)
        for x, seen in PREFILL.observed.items()
    }
    return part_of(PREFILL, shard, observed)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(CASES))
def test_scorers(name, ranks):
    scorer = SCORERS.build(name, **CASES[name])
    whole = scorer(PREFILL, REGION)
    parts = in_threads(ranks, lambda shard: scorer(part(shard), REGION))
    found = torch.cat([x.scores for x in parts], dim=1)
    torch.testing.assert_close(found, whole.scores, rtol=1e-4, atol=1e-7)
    for mine in parts:
        assert torch.equal(mine.seed_scores, parts[0].seed_scores)
        torch.testing.assert_close(mine.seed_scores, whole.seed_scores, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", [x for x in SENSITIVITIES if SENSITIVITIES.get(x).works_sharded])
def test_sensitivities(name):
    sensitivity = SENSITIVITIES.build(name)
    parts = in_threads(2, lambda shard: sensitivity(part(shard)))
    torch.testing.assert_close(torch.cat(parts, dim=1), sensitivity(PREFILL))


def test_reference_queries_are_the_same_in_every_process():
    queries = ReferenceQueries(replay=Replay(max_queries=12), tail=4)
    whole = queries(PREFILL.layer(1), REGION, {})
    for mine in in_threads(4, lambda shard: queries(part(shard).layer(1), REGION, {})):
        assert torch.equal(mine.positions, whole.positions)
        torch.testing.assert_close(mine.weights, whole.weights)
