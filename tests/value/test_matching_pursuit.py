"""The order of Attention Matching's pursuit, against least squares from scratch at every step."""

import torch
from hypothesis import given

from gracekv.testing import synthetic_prefill
from gracekv.value import MatchingPursuit, RepeatedAttention, reference
from gracekv.value.matching_pursuit import pursued
from support.draws import ints, some


@given(
    seed=ints(0, 2**16),
    rows=ints(2, 30),
    length=ints(1, 30),
    most=ints(1, 40),
    largest=some([1.5, 1000.0]),
)
def test_equals_the_plain_pursuit(seed, rows, length, most, largest):
    rng = torch.Generator().manual_seed(seed)
    mass = torch.rand(2, rows, length, generator=rng, dtype=torch.float64) ** 4
    got = pursued(mass, most, largest)
    assert got.shape == (2, min(most, rows, length))
    for head in range(2):
        # With as many columns as rows the residual is zero, and rounding errors would decide.
        sure = min(got.shape[1], rows)
        assert got[head, :sure].tolist() == reference.pursued(mass[head], most, largest)[:sure]


def test_dependent_columns_are_taken_without_harm():
    mass = torch.rand(1, 20, 4, generator=torch.Generator().manual_seed(0)).repeat(1, 1, 3)
    taken = pursued(mass, 12, 1000.0)[0].tolist()
    assert sorted(taken) == list(range(12))
    assert len({x % 4 for x in taken[:4]}) == 4


def test_the_first_tokens_of_the_order_score_above_all_others():
    prefill = synthetic_prefill(context=60)
    region = prefill.spans.region(4)
    scores = MatchingPursuit(most=10)(prefill, region).scores
    plain = RepeatedAttention()(prefill, region).scores
    first = scores >= 2
    assert first.sum(dim=-1).eq(10).all()
    torch.testing.assert_close(scores[~first], plain[~first], rtol=1e-4, atol=1e-7)
