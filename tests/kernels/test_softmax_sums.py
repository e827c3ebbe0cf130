"""Columns of softmax rows: every implementation against float64."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings

from gracekv.kernels import softmax_sums
from gracekv.kernels.softmax_sums import softmax_columns
from support.draws import SEEDS, bools, floats, ints, some

ENGINES = ["torch"]
if importlib.util.find_spec("numba") is not None:
    ENGINES.append("numba")


def case(seed, groups, group, count, length, dim, dtype=torch.float32):
    made = torch.Generator().manual_seed(seed)
    queries = torch.randn(groups * group, count, dim, generator=made)
    keys = torch.randn(groups, length, dim, generator=made).to(dtype)
    seen = torch.randint(1, length + 1, (count,), generator=made)
    return queries, keys, seen, torch.rand(count, generator=made)


def reference(queries, keys, seen, weights, power, maximum, sinks=None):
    """The definition in float64."""
    keys = keys.double().repeat_interleave(len(queries) // len(keys), dim=0)
    logits = queries.double() @ keys.mT
    logits.masked_fill_(torch.arange(keys.shape[1]) >= seen[:, None], -torch.inf)
    if sinks is not None:
        each = sinks.double().view(len(queries), -1, 1).expand(-1, logits.shape[1], 1)
        logits = torch.cat([logits, each], dim=-1)
    shares = weights.double()[:, None] * logits.softmax(-1)[..., : keys.shape[1]] ** power
    return shares.amax(1) if maximum else shares.sum(1)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=40)
@given(
    seed=SEEDS, groups=ints(1, 3), group=ints(1, 3), count=ints(1, 300), length=ints(1, 200),
    dim=some([2, 8, 20, 64]), power=some([1.0, 1.5, 2.0, 3.0]), maximum=bools(),
    sink=some([None, 1.0, 30.0]), of_heads=bools(),
    dtype=some([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_equals_the_definition(
    engine, seed, groups, group, count, length, dim, power, maximum, sink, of_heads, dtype
):
    inputs, made = case(seed, groups, group, count, length, dim, dtype), torch.Generator()
    shape = inputs[0].shape[: 1 if of_heads else 2]
    # With large sinks, some rows have no weight left for their keys.
    sinks = None if sink is None else sink * torch.randn(shape, generator=made.manual_seed(seed))
    got = softmax_columns(*inputs, power=power, maximum=maximum, sinks=sinks, engine=engine)
    want = reference(*inputs, power, maximum, sinks)
    # float32 logits of up to 64 products, sums of up to 300 shares.
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("engine", ENGINES)
def test_blocks_of_queries_end_anywhere(engine, monkeypatch):
    monkeypatch.setattr(softmax_sums, "_CPU_BLOCK", 1)
    monkeypatch.setattr(softmax_sums, "_LEAST_ROWS", 3)
    inputs = case(0, 2, 2, 130, 70, 8)
    got = softmax_columns(*inputs, engine=engine)
    torch.testing.assert_close(got.double(), reference(*inputs, 1.0, False), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("engine", ENGINES)
def test_large_and_equal_logits(engine):
    queries, keys, seen, weights = case(1, 1, 1, 5, 100, 8)
    got = softmax_columns(1e4 * queries, keys, seen, weights, engine=engine)
    torch.testing.assert_close(got.sum(), weights.sum())
    got = softmax_columns(0 * queries, keys, seen, engine=engine)
    torch.testing.assert_close(got[0], ((torch.arange(100) < seen[:, None]) / seen[:, None]).sum(0))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, 1.5])
def test_nan_stays_nan(engine, power):
    queries, keys, seen, weights = case(4, 2, 1, 5, 40, 8)
    keys[1, 3] = torch.nan
    got = softmax_columns(queries, keys, seen + 9, weights, power=power, engine=engine)
    assert got[0].isfinite().all()
    assert got[1, :10].isnan().all()


@pytest.mark.skipif("numba" not in ENGINES, reason="needs numba")
@given(seed=ints(0, 2**32), scale=floats(1, 30), power=some([1.5, 2.0, 3.0]))
def test_no_number_is_denormal(seed, scale, power):
    """Denormal numbers, which distant keys' shares become, take a hundred times as long."""
    queries, keys, _, _ = case(seed, 1, 1, 1, 300, 8)
    got = softmax_columns(scale * queries, keys, 300, power=power, engine="numba")
    want = reference(scale * queries, keys, torch.tensor([300]), torch.ones(1), power, False)
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=1e-30)
    assert ((got == 0) | (got >= torch.finfo(torch.float32).tiny)).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_views_and_no_queries(engine):
    queries, keys, seen, weights = case(2, 2, 2, 40, 60, 8)
    want = softmax_columns(queries, keys, seen.clamp(max=50), weights, engine=engine)[:, :50]
    part = softmax_columns(queries, keys[:, :50], seen.clamp(max=50), weights, engine=engine)
    torch.testing.assert_close(part, want)
    assert not softmax_columns(queries[:, :0], keys, seen[:0], engine=engine).any()


@pytest.mark.skipif("numba" not in ENGINES, reason="needs numba")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads, count):
    inputs = case(3, 2, 2, 400, 300, 16)
    want = softmax_columns(*inputs, engine="numba")
    threads(count)
    assert torch.equal(softmax_columns(*inputs, engine="numba"), want)
