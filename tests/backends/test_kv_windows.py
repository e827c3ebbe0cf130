"""The windows of the sdpa backend: each entry seen once, results equal to the eager backend."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.backends import Eager, Sdpa
from gracekv.backends import kv_windows as windows_module
from gracekv.backends.kv_windows import WindowedLayer
from gracekv.cache.base import RaggedLayer
from gracekv.testing.attention import TOLERANCES, relative_error

KERNELS = [Sdpa(), Sdpa(kernel="plain")]
LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 400)), min_size=1, max_size=6)


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch):
    """So that small layers have many windows too."""
    monkeypatch.setattr(windows_module, "_SHORTEST", 2)
    monkeypatch.setattr(windows_module, "_MIXING", windows_module._MIXING)


@pytest.fixture(params=[1, 4])
def threads(request, monkeypatch):
    monkeypatch.setattr(windows_module.torch, "get_num_threads", lambda: request.param)
    return request.param


def poisoned(x):
    """`x` inside a buffer of NaN."""
    buffer = x.new_full((len(x) + 9, *x.shape[1:]), math.nan)
    buffer[4:-5] = x
    return buffer[4:-5]


def ragged(rng, lengths, dim=64, dtype=torch.float32, sequences=1, bias=True):
    entries = sum(lengths)
    return RaggedLayer(
        keys=poisoned(torch.randn(entries, dim, generator=rng).to(dtype)),
        values=poisoned(torch.randn(entries, dim, generator=rng).to(dtype)),
        positions=torch.arange(entries, dtype=torch.int32),
        log_multiplicity=poisoned(torch.rand(entries, generator=rng) * 4 * bias),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        sequences=sequences,
    )


@given(
    lengths=LENGTHS,
    group=st.integers(1, 8),
    sequences=st.integers(1, 3),
    continuations=st.integers(1, 2),
)
def test_every_entry_is_seen_once_by_each_query_of_its_head(
    lengths, group, sequences, continuations
):
    """Scatter each window row's visible entries back to its query."""
    lengths = lengths * sequences
    layer = ragged(torch.Generator().manual_seed(0), lengths, 8, sequences=sequences)
    batch, heads = sequences * continuations, layer.heads * group
    windows = WindowedLayer(layer).windows((batch, heads, 1), None)
    if windows is None:
        assert sum(lengths) == 0 or layer.heads * group * continuations > 8
        return
    entry = torch.arange(layer.entries).unfold(0, windows.keys.shape[2], _step(windows))
    visible = torch.ones(windows.gather.shape[0], windows.gather.shape[2], entry.shape[1])
    if windows.bias is not None:
        visible = (windows.bias[:, 0] > -math.inf).float().expand_as(visible)
    by_row = torch.zeros(visible[..., 0].numel() + 1, layer.entries)
    by_row[:-1].view(*visible.shape[:2], -1).scatter_(
        2, entry[:, None].expand(visible.shape), visible
    )
    seen = by_row[windows.slots[:, 1:]].sum(1).view(batch, layer.heads, group, -1)
    for b in range(batch):
        for g in range(layer.heads):
            row = b // continuations * layer.heads + g
            want = torch.zeros(layer.entries)
            want[layer.offsets[row] : layer.offsets[row + 1]] = 1
            assert torch.equal(seen[b, g], want.expand(group, -1))
    # And a row of results belongs to the query that it was made from.
    origin = windows.gather.flatten()
    query = torch.arange(batch * heads)[:, None].expand_as(windows.slots[:, 1:])
    real = windows.slots[:, 1:] < len(origin)
    assert torch.equal(origin[windows.slots[:, 1:][real]], query[real])


def _step(windows):
    return windows.keys.stride(0) // windows.keys.stride(2)


@pytest.mark.parametrize("mixing", [0, 1 << 40])
@pytest.mark.parametrize("backend", KERNELS, ids=repr)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=LENGTHS,
    group=st.sampled_from([1, 2, 3, 4, 7, 8]),
    sequences=st.integers(1, 3),
    batch=st.integers(1, 4),
    tokens=st.sampled_from([1, 1, 2, 40]),
    before=st.integers(0, 9),
    masked=st.sampled_from(["none", "bool", "float"]),
    unequal=st.booleans(),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_equals_the_reference_backend(
    mixing,
    backend,
    seed,
    lengths,
    group,
    sequences,
    batch,
    tokens,
    before,
    masked,
    unequal,
    dim,
    dtype,
):
    windows_module._MIXING = mixing
    rng = torch.Generator().manual_seed(seed)
    lengths = [n if (i + seed) % 3 else 0 for i, n in enumerate(lengths * sequences)]
    layer = ragged(rng, lengths, dim, dtype, sequences)
    rows = torch.randint(0, sequences, (batch,), generator=rng) if unequal else None
    if rows is None:
        batch *= sequences
    heads, length = layer.heads * group, before + tokens
    query = torch.randn(batch, heads, tokens, dim, generator=rng).to(dtype)
    keys, values = (
        torch.full((batch, layer.heads, length + 4, dim), math.nan, dtype=dtype) for _ in range(2)
    )
    keys, values = keys[:, :, :length], values[:, :, :length]
    for x in (keys, values):
        x.copy_(torch.randn(x.shape, generator=rng))
    mask = None
    if masked == "bool":
        mask = torch.rand(batch, 1, tokens, length, generator=rng) < 0.3
        mask[0, :, 0] = False
    elif masked == "float":
        mask = torch.randn(batch, 1, tokens, length, generator=rng)
    asked = (keys, values, mask, dim**-0.5, rows)

    prepared = backend.prepare(layer)
    output = backend(query, prepared, *asked)
    part = backend.packed(query, prepared, dim**-0.5, rows)

    bound = TOLERANCES[dtype]
    want = Eager()(
        query.float(),
        Eager().prepare(_float(layer)),
        *(x.float() if torch.is_tensor(x) and x.dtype == dtype else x for x in asked),
    )
    expected = Eager().packed(query.float(), Eager().prepare(_float(layer)), dim**-0.5, rows)
    assert output.dtype == part.output.dtype == dtype
    assert output.shape == part.output.shape == query.shape
    assert relative_error(output, want) <= 2 * bound.output
    assert relative_error(part.output, expected.output) <= 2 * bound.output
    torch.testing.assert_close(part.lse, expected.lse, rtol=0, atol=bound.lse)
    assert bool((part.output[expected.lse == -math.inf] == 0).all())


def _float(layer):
    return RaggedLayer(
        layer.keys.float(),
        layer.values.float(),
        layer.positions,
        layer.log_multiplicity,
        layer.offsets,
        layer.sequences,
    )


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("lengths", "group"),
    [([4000, 80, 80, 80], 7), ([80, 4000, 80, 80], 4), ([700] * 8, 4), ([900], 71), ([3, 0, 2], 3)],
)
def test_unbalanced_and_even_heads(lengths, group):
    rng = torch.Generator().manual_seed(1)
    layer = ragged(rng, lengths)
    query = torch.randn(1, len(lengths) * group, 1, 64, generator=rng)
    keys, values = (torch.randn(1, len(lengths), 5, 64, generator=rng) for _ in range(2))

    output = Sdpa()(query, Sdpa().prepare(layer), keys, values, None, 0.125)

    want = Eager()(query, layer, keys, values, None, 0.125)
    assert relative_error(output, want) <= TOLERANCES[torch.float32].output


@pytest.mark.usefixtures("threads")
def test_many_queries_go_head_by_head():
    rng = torch.Generator().manual_seed(2)
    layer = ragged(rng, [300, 0, 41])
    query = torch.randn(2, 6, 80, 64, generator=rng)
    prepared = Sdpa().prepare(layer)

    assert prepared.windows(query.shape[:3], None) is None
    part = Sdpa().packed(query, prepared, 0.125)

    assert prepared.held_bytes == 0
    want = Eager().packed(query, layer, 0.125)
    assert relative_error(part.output, want.output) <= TOLERANCES[torch.float32].output
    torch.testing.assert_close(part.lse, want.lse, rtol=0, atol=1e-4)


def test_a_plan_serves_all_steps_of_one_shape_and_then_makes_room():
    layer = ragged(torch.Generator().manual_seed(3), [90, 60, 30, 20], sequences=2)
    prepared = Sdpa().prepare(layer)
    first = prepared.windows((2, 6, 1), None)

    assert prepared.windows((2, 6, 1), None) is first
    swapped = prepared.windows((2, 6, 1), torch.tensor([1, 0]))
    assert swapped is not first
    assert not torch.equal(swapped.gather, first.gather)
    assert prepared.windows((2, 6, 1), torch.tensor([1, 0])) is swapped
    assert prepared.held_bytes == swapped.held_bytes
    back = prepared.windows((2, 6, 1), torch.tensor([0, 1]))
    assert torch.equal(back.gather, first.gather)


def test_even_heads_without_multiplicities_hold_no_bias():
    layer = ragged(torch.Generator().manual_seed(4), [2048, 2048], bias=False)
    windows = Sdpa().prepare(layer).windows((1, 4, 1), None)

    assert windows.bias is None


def test_a_plan_from_inference_mode_serves_a_step_that_is_differentiated():
    layer = ragged(torch.Generator().manual_seed(5), [50, 40])
    prepared = Sdpa().prepare(layer)
    with torch.inference_mode():
        Sdpa().warm_up(prepared, 4)
    query = torch.randn(1, 4, 1, 64, requires_grad=True)
    tail = torch.randn(1, 2, 3, 64)

    Sdpa()(query, prepared, tail, tail, None, 0.125).sum().backward()

    assert bool(query.grad.isfinite().all())
