from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.errors import ConfigError, MissingCaptureError, NonFiniteError
from gracekv.prefill import Needs
from gracekv.segment import Curvature, CurvatureDP, curvature, reference
from gracekv.segment.curvature import BlockInput, hidden_at
from gracekv.segment.curvature_dp import dispersion_table, robust_zscore
from gracekv.segment.surprisal import Surprisal
from gracekv.testing import synthetic_prefill
from support.draws import SEEDS, ints, some
from support.segmented import by_reference

WEIGHTS = ("curvature_weight", "surprisal_weight", "dispersion_weight", "length_weight")
# Small limits and windows keep the reference's loops short.
TINY = CurvatureDP(min_length=3, max_length=9, target_length=5, curvature=Curvature(windows=(2, 3)))


@given(
    context=ints(10, 40), recent=ints(0, 8), cut_cost=some([0.0, 1.0]), seed=SEEDS,
    weights=st.fixed_dictionaries(dict.fromkeys(WEIGHTS, some([0.0, 0.3, 1.0]))),
)  # fmt: skip
def test_every_step_matches_reference(context, recent, weights, cut_cost, seed):
    prefill = synthetic_prefill(layers=3, context=context, hidden_dim=6, seed=seed)
    region = prefill.spans.region(recent)
    # Without a length preference, equal totals differ only by rounding.
    weights = weights | {"length_weight": weights["length_weight"] + 0.1}
    rule = replace(TINY, **weights, cut_cost=cut_cost)
    kappa, score, profit, bounds = by_reference(prefill, region, rule)
    partition = rule(prefill, region)
    np.testing.assert_allclose(partition.curvature.numpy(), kappa, rtol=1e-9, atol=1e-9)
    fast_score = rule.boundary_score(partition.curvature, prefill.observation(Surprisal()))
    np.testing.assert_allclose(fast_score.numpy(), score, rtol=1e-7, atol=1e-7)
    fast_profit = rule.slot_profits(
        torch.from_numpy(score)[region.start : region.end],
        [hidden[region.start : region.end] for hidden in hidden_at(prefill, (0.33, 0.5, 0.67))],
    ).numpy()
    inside = ~np.isnan(profit)
    np.testing.assert_allclose(fast_profit[inside], profit[inside], rtol=1e-9, atol=1e-9)
    total = sum(profit[a, b - a - 1] for a, b in pairwise(bounds - region.start))
    own_bounds = partition.bounds.numpy() - region.start
    reached = sum(profit[a, b - a - 1] for a, b in pairwise(own_bounds))
    # Slots may differ only if they are worth as much.
    assert reached == pytest.approx(total, abs=1e-7)


@settings(max_examples=10)
@given(context=ints(1, 200), seed=SEEDS)
def test_respects_the_paper_limits(context, seed):
    prefill = synthetic_prefill(context=context, seed=seed)
    lengths = CurvatureDP()(prefill, prefill.spans.region(0)).lengths
    assert (lengths[:-1] >= 16).all()
    assert (lengths <= 128).all()
    # Slots of 16 to 128 tokens cover any length from 16 on; the exception is for shorter ones.
    assert lengths[-1] >= 16 or len(lengths) == 1


@pytest.mark.parametrize(("cut_cost", "lengths"), [(0.0, [64] * 4), (1.0, [128] * 2)])
def test_without_evidence_lengths_weigh_the_target_against_the_cost_of_cuts(cut_cost, lengths):
    # Four slots of 64 pay three cuts; two of 128 pay one cut and 0.1 each for their length.
    rule = CurvatureDP(**dict.fromkeys(WEIGHTS[:3], 0.0), cut_cost=cut_cost)
    prefill = synthetic_prefill(context=256)
    assert rule(prefill, prefill.spans.region(0)).lengths.tolist() == lengths


def test_needs_follow_the_weights():
    depths = Needs.observed(*map(BlockInput, (0.33, 0.5, 0.67)))
    assert CurvatureDP().needs() == depths | Needs.observed(Surprisal())
    assert CurvatureDP(surprisal_weight=0.0).needs() == depths


def test_surprisal_is_asked_for_only_where_it_counts():
    prefill = synthetic_prefill().without(Surprisal)
    region = prefill.spans.region(8)
    CurvatureDP(surprisal_weight=0.0)(prefill, region)
    with pytest.raises(MissingCaptureError, match="Surprisal"):
        CurvatureDP()(prefill, region)


def test_refuses_surprisal_that_is_not_finite():
    prefill = synthetic_prefill()
    prefill.observation(Surprisal())[20] = torch.inf
    with pytest.raises(NonFiniteError, match="surprisal"):
        CurvatureDP()(prefill, prefill.spans.region(8))


def test_the_longest_slot_is_not_shorter_than_the_shortest():
    with pytest.raises(ConfigError, match="max_length"):
        CurvatureDP(min_length=20, max_length=19)


def walks(layers: int, length: int, dim: int, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(length, dim, generator=rng).cumsum(0) for _ in range(layers)]


@given(layers=ints(1, 3), length=ints(1, 24), longest=ints(1, 12), seed=SEEDS)
def test_matches_reference(layers, length, longest, seed):
    states = walks(layers, length, 4, seed)
    expected = torch.zeros(length, longest, dtype=torch.float64)
    for a in range(length):
        for n in range(1, min(longest, length - a) + 1):
            expected[a, n - 1] = reference.dispersion(states, a, a + n, 1e-6)
    table = dispersion_table(states, longest, 1e-6)
    torch.testing.assert_close(table, expected, rtol=1e-10, atol=1e-12)


def test_chunks_do_not_show(monkeypatch):
    states = walks(2, 100, 5, seed=0)
    whole = dispersion_table(states, 20, 1e-6)
    monkeypatch.setattr(curvature, "_CHUNK_BYTES", 1)
    torch.testing.assert_close(dispersion_table(states, 20, 1e-6), whole, rtol=1e-10, atol=1e-12)


@given(length=ints(1, 40), spread=some([1, 5, 10**6]), seed=SEEDS)
def test_zscore_matches_reference(length, spread, seed):
    # Few distinct values, so that zero MADs and equal middles occur.
    rng = torch.Generator().manual_seed(seed)
    signal = torch.randint(-spread, spread + 1, (length,), generator=rng).double()
    np.testing.assert_allclose(
        robust_zscore(signal).numpy(), reference.robust_zscore(signal.tolist()), rtol=1e-12
    )


def test_computes_in_float64_whatever_comes_in():
    assert robust_zscore(torch.arange(4, dtype=torch.float16)).dtype == torch.float64
