"""The compiled kernel for steps of one token: equal to float64, on any number of threads."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from gracekv.backends import AttentionStep, Numba, split_kv
from gracekv.backends.reference import attention
from gracekv.testing.attention import TOLERANCES, relative_error
from support.covering import LONG
from support.decode_steps import drawn, ragged, step
from support.draws import SEEDS, bools, ints, lists, some

pytestmark = pytest.mark.usefixtures("short_splits", "no_detour")


def read(query, layer, keys, values, scale=0.125, mask=None, **options):
    prepared = Numba().prepare(layer)
    return Numba()(AttentionStep(query, prepared, keys, values, scale, mask, **options))


@settings(max_examples=150 if LONG else 60)
@given(
    seed=SEEDS, lengths=lists(ints(0, 3) | ints(0, 90), min_size=1, max_size=4),
    group=some([1, 2, 3, 4, 7, 8]), sequences=ints(1, 3), batch=ints(1, 4), tail=ints(1, 30),
    masked=some(["none", "bool", "float", "one for all"]), unequal=bools(),
    dim=some([5, 64, 80, 96, 128, 256]), dtype=some(list(TOLERANCES)), most=some([1, 7, 256]),
    softcap=some([None, 0.1, 1.5, 50.0]), sinks=bools(),
)  # fmt: skip
def test_equals_attention_in_float64(
    seed, lengths, group, sequences, batch, tail, masked, unequal, dim, dtype, most, softcap, sinks
):
    split_kv._ENTRIES = most
    rng = torch.Generator().manual_seed(seed)
    lengths = [n if (i + seed) % 3 else 0 for i, n in enumerate(lengths * sequences)]
    layer = ragged(rng, lengths, dim, dtype, sequences)
    rows = torch.randint(0, sequences, (batch,), generator=rng) if unequal else None
    if rows is None:
        batch *= sequences
    query, keys, values = step(rng, layer, group, batch, tail)
    mask = None
    if masked == "float":
        mask = torch.randn(batch, 1, 1, tail, generator=rng)
    elif masked != "none":
        mask = torch.rand(1 if masked == "one for all" else batch, 1, 1, tail, generator=rng) < 0.3
        mask[0] = False
    asked = (keys, values, dim**-0.5, mask)
    logits = torch.randn(query.shape[1], generator=rng).to(dtype) if sinks else None
    options = {"rows": rows, "softcap": softcap, "sink_logits": logits}

    output = read(query, layer, *asked, **options)

    assert output.dtype == dtype
    assert output.shape == query.shape
    want = attention(AttentionStep(query, layer, *asked, **options))[0]
    assert relative_error(output, want) <= TOLERANCES[dtype]
    assert bool((output[want == 0] == 0).all())


def test_logits_that_are_far_apart():
    """e^x of the largest and the smallest that float32 holds; nothing overflows."""
    layer, query, keys, values = drawn(2, [50, 31], 2, 1, 9)

    output = read(query * 1000, layer, keys, values, 1.0)

    want = attention(AttentionStep(query * 1000, layer, keys, values, 1.0))[0]
    assert relative_error(output, want) <= TOLERANCES[torch.float32]


def test_what_is_hidden_weighs_nothing():
    layer, query, keys, values = drawn(15, [40], 2, 1, 12)
    mask = torch.ones(1, 1, 1, 12, dtype=torch.bool)
    mask[..., 4:] = False
    want = read(query, layer, keys, values, mask=mask)

    values[:, :, 4:] = 3e38

    assert torch.equal(read(query, layer, keys, values, mask=mask), want)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_the_same_bits_on_any_number_of_threads(threads, dtype):
    layer, *asked = drawn(3, [300, 5, 0, 120, 40, 71], 3, 6, 40, dtype=dtype, sequences=2)
    prepared = Numba().prepare(layer)
    found = []
    for count in (1, 2, 3, 8, 3, 2, 1):
        threads(count)
        found += [Numba()(AttentionStep(asked[0], prepared, *asked[1:], 0.125)) for _ in range(20)]

    assert all(torch.equal(one, found[0]) for one in found)


def test_a_continuation_does_not_depend_on_the_others():
    layer, query, keys, values = drawn(4, [90, 60, 30, 20], 3, 6, 20, sequences=2)
    rows = torch.tensor([1, 0, 0, 1, 1, 0])
    together = read(query, layer, keys, values, rows=rows)

    for b in range(6):
        own, at = layer.sequence(int(rows[b])), slice(b, b + 1)
        assert torch.equal(read(query[at], own, keys[at], values[at]), together[at])


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("where", ["query", "packed key", "packed value", "tail key", "tail value"])
def test_a_nan_is_not_hidden(where, softcap):
    layer, query, keys, values = drawn(6, [40, 40], 2, 1, 12)
    of = {
        "query": query[0, 2, 0], "packed key": layer.keys[55], "packed value": layer.values[55],
        "tail key": keys[0, 1, 8], "tail value": values[0, 1, 8],
    }  # fmt: skip
    of[where][:] = math.nan

    output = read(query, layer, keys, values, softcap=softcap)

    assert bool(output[0, :2].isfinite().all())
    assert bool(output[0, 2].isnan().all())


@pytest.mark.parametrize("change", ["transposed", "unlike", "gaps", "strided query"])
def test_states_that_lie_otherwise(change):
    layer, query, keys, values = drawn(7, [40, 11], 2, 2, 12)
    if change == "transposed":  # [B, S, G, d], as projections give them
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    elif change == "unlike":
        values = values.contiguous()
    elif change == "strided query":
        query = torch.stack([query, query], dim=-1)[..., 0]
    else:
        keys, values = (torch.cat([x, x], dim=-1)[..., :64] for x in (keys, values))

    output = read(query, layer, keys, values)

    want = attention(AttentionStep(query, layer, keys, values, 0.125))[0]
    assert relative_error(output, want) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, np.uint16), (torch.float16, np.int16)], ids=str
)
def test_every_half_is_read_exactly(dtype, bits):
    numba = pytest.importorskip("numba")
    from gracekv.kernels.intrinsics import as_float32

    @numba.njit
    def widened(rows, wide):
        return as_float32(rows, 0, len(rows), wide)[0]

    every = np.arange(2**16, dtype=np.uint16).view(bits).reshape(-1, 64)
    want = torch.from_numpy(every.view(np.int16)).view(dtype).float()

    got = torch.from_numpy(widened(every, np.empty(every.shape, np.float32)))

    number = ~want.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[number].view(torch.int32), want[number].view(torch.int32))
