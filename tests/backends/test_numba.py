"""The compiled kernel for steps of one token: equal to float64, on any number of threads."""

import importlib
import importlib.util
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.backends import Auto, Eager, Numba, Sdpa, split_kv
from gracekv.backends import numba as backend_module
from gracekv.backends.reference import attention
from gracekv.cache.base import RaggedLayer
from gracekv.errors import BackendUnavailableError
from gracekv.kernels import omp_threads
from gracekv.testing.tolerance import TOLERANCES, relative_error

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch):
    """Small heads have many splits too."""
    monkeypatch.setattr(split_kv, "_ENTRIES", 7)


@pytest.fixture
def no_detour(monkeypatch):
    """Steps that would be handed to sdpa fail."""

    def refuse(*args, **kwargs):
        raise AssertionError("went to sdpa")

    monkeypatch.setattr(Sdpa, "__call__", refuse)


def inside_nan(x):
    """`x` inside a buffer of NaN."""
    buffer = x.new_full((len(x) + 9, *x.shape[1:]), math.nan)
    buffer[4:-5] = x
    return buffer[4:-5]


def ragged(rng, lengths, dim=64, dtype=torch.float32, sequences=1):
    entries = sum(lengths)
    return RaggedLayer(
        keys=inside_nan(torch.randn(entries, dim, generator=rng).to(dtype)),
        values=inside_nan(torch.randn(entries, dim, generator=rng).to(dtype)),
        positions=torch.arange(entries, dtype=torch.int32),
        log_multiplicity=inside_nan(torch.rand(entries, generator=rng) * 4),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        sequences=sequences,
    )


def step(rng, layer, group, batch, length):
    """Query, and a tail whose unused places are NaN."""
    dim, dtype = layer.keys.shape[1], layer.keys.dtype
    query = torch.randn(batch, layer.heads * group, 1, dim, generator=rng).to(dtype)
    buffers = torch.full((2, batch, layer.heads, length + 3, dim), math.nan, dtype=dtype)
    buffers[:, :, :, :length] = torch.randn(2, batch, layer.heads, length, dim, generator=rng)
    keys, values = buffers[:, :, :, :length]
    return query, keys, values


@pytest.mark.usefixtures("no_detour")
@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 3, 4, 7, 8]),
    sequences=st.integers(1, 3),
    batch=st.integers(1, 4),
    tail=st.integers(1, 30),
    masked=st.sampled_from(["none", "bool", "float", "one for all"]),
    unequal=st.booleans(),
    dim=st.sampled_from([5, 64, 80, 96, 128, 256]),
    dtype=st.sampled_from(list(TOLERANCES)),
    most=st.sampled_from([1, 7, 256]),
)
def test_equals_attention_in_float64(
    seed, lengths, group, sequences, batch, tail, masked, unequal, dim, dtype, most
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
    asked = (keys, values, mask, dim**-0.5, rows)
    backend = Numba()

    output = backend(query, backend.prepare(layer), *asked)

    assert output.dtype == dtype
    assert output.shape == query.shape
    want = attention(query, layer, *asked)[0]
    assert relative_error(output, want) <= TOLERANCES[dtype].output
    assert bool((output[want == 0] == 0).all())


@pytest.mark.usefixtures("no_detour")
@pytest.mark.parametrize("most", [7, 256])
def test_long_uneven_heads(monkeypatch, most):
    monkeypatch.setattr(split_kv, "_ENTRIES", most)
    rng = torch.Generator().manual_seed(1)
    layer = ragged(rng, [3000, 17, 900])
    query, keys, values = step(rng, layer, 3, 2, 700)

    output = Numba()(query, Numba().prepare(layer), keys, values, None, 0.125)

    want = attention(query, layer, keys, values, None, 0.125)[0]
    assert relative_error(output, want) <= TOLERANCES[torch.float32].output


@pytest.mark.usefixtures("no_detour")
def test_logits_that_are_far_apart():
    """e^x of the largest and the smallest that float32 holds; nothing overflows."""
    rng = torch.Generator().manual_seed(2)
    layer = ragged(rng, [50, 31])
    query, keys, values = step(rng, layer, 2, 1, 9)

    output = Numba()(query * 1000, Numba().prepare(layer), keys, values, None, 1.0)

    want = attention(query * 1000, layer, keys, values, None, 1.0)[0]
    assert relative_error(output, want) <= TOLERANCES[torch.float32].output


@pytest.mark.usefixtures("no_detour")
def test_what_is_hidden_weighs_nothing():
    rng = torch.Generator().manual_seed(15)
    layer = ragged(rng, [40])
    query, keys, values = step(rng, layer, 2, 1, 12)
    mask = torch.ones(1, 1, 1, 12, dtype=torch.bool)
    mask[..., 4:] = False
    prepared = Numba().prepare(layer)
    want = Numba()(query, prepared, keys, values, mask, 0.125)

    values[:, :, 4:] = 3e38

    assert torch.equal(Numba()(query, prepared, keys, values, mask, 0.125), want)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.usefixtures("no_detour")
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_the_same_bits_on_any_number_of_threads(threads, dtype):
    rng = torch.Generator().manual_seed(3)
    layer = ragged(rng, [300, 5, 0, 120, 40, 71], 64, dtype, sequences=2)
    asked = step(rng, layer, 3, 6, 40)
    prepared = Numba().prepare(layer)
    found = []
    for count in (1, 2, 3, 8, 3, 2, 1):
        threads(count)
        found += [Numba()(asked[0], prepared, *asked[1:], None, 0.125) for _ in range(20)]

    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.usefixtures("no_detour")
def test_a_continuation_does_not_depend_on_the_others():
    rng = torch.Generator().manual_seed(4)
    layer = ragged(rng, [90, 60, 30, 20], sequences=2)
    query, keys, values = step(rng, layer, 3, 6, 20)
    rows = torch.tensor([1, 0, 0, 1, 1, 0])
    together = Numba()(query, Numba().prepare(layer), keys, values, None, 0.125, rows)

    for b in range(6):
        own, at = Numba().prepare(layer.sequence(int(rows[b]))), slice(b, b + 1)
        alone = Numba()(query[at], own, keys[at], values[at], None, 0.125)
        assert torch.equal(alone, together[at])


@pytest.mark.usefixtures("no_detour")
def test_callers_in_several_threads_do_not_meet():
    rng = torch.Generator().manual_seed(5)
    layer = ragged(rng, [400, 300, 20])
    prepared = Numba().prepare(layer)
    asked = [step(rng, layer, 3, 1, 30) for _ in range(4)]
    alone = [Numba()(q, prepared, k, v, None, 0.125) for q, k, v in asked]
    wrong = []

    def work(number):
        query, keys, values = asked[number]
        for _ in range(200):
            output = Numba()(query, prepared, keys, values, None, 0.125)
            if not torch.equal(output, alone[number]):
                wrong.append(number)

    callers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.usefixtures("no_detour")
@pytest.mark.parametrize("where", ["query", "packed key", "packed value", "tail key", "tail value"])
def test_a_nan_is_not_hidden(where):
    rng = torch.Generator().manual_seed(6)
    layer = ragged(rng, [40, 40])
    query, keys, values = step(rng, layer, 2, 1, 12)
    of = {
        "query": query[0, 2, 0],
        "packed key": layer.keys[55],
        "packed value": layer.values[55],
        "tail key": keys[0, 1, 8],
        "tail value": values[0, 1, 8],
    }
    of[where][:] = math.nan

    output = Numba()(query, Numba().prepare(layer), keys, values, None, 0.125)

    assert bool(output[0, :2].isfinite().all())
    assert bool(output[0, 2].isnan().all())


@pytest.mark.usefixtures("no_detour")
@pytest.mark.parametrize("change", ["transposed", "unlike", "gaps"])
def test_tails_that_lie_otherwise(change):
    rng = torch.Generator().manual_seed(7)
    layer = ragged(rng, [40, 11])
    query, keys, values = step(rng, layer, 2, 2, 12)
    if change == "transposed":  # [B, S, G, d], as projections give them
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    elif change == "unlike":
        values = values.contiguous()
    else:
        keys, values = (torch.cat([x, x], dim=-1)[..., :64] for x in (keys, values))

    output = Numba()(query, Numba().prepare(layer), keys, values, None, 0.125)

    want = attention(query, layer, keys, values, None, 0.125)[0]
    assert relative_error(output, want) <= TOLERANCES[torch.float32].output


def test_queries_that_do_not_lie_one_after_the_other():
    rng = torch.Generator().manual_seed(8)
    layer = ragged(rng, [40, 11])
    query, keys, values = step(rng, layer, 2, 2, 12)
    strided = torch.stack([query, query], dim=-1)[..., 0]
    prepared = Numba().prepare(layer)

    assert torch.equal(
        Numba()(strided, prepared, keys, values, None, 0.125),
        Numba()(query, prepared, keys, values, None, 0.125),
    )


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, np.uint16), (torch.float16, np.int16)], ids=str
)
def test_every_half_is_read_exactly(dtype, bits):
    numba = pytest.importorskip("numba")
    from gracekv.kernels.half_precision import as_float32

    @numba.njit
    def read(rows, wide):
        return as_float32(rows, 0, len(rows), wide)[0]

    every = np.arange(2**16, dtype=np.uint16).view(bits).reshape(-1, 64)
    want = torch.from_numpy(every.view(np.int16)).view(dtype).float()

    got = torch.from_numpy(read(every, np.empty(every.shape, np.float32)))

    number = ~want.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[number].view(torch.int32), want[number].view(torch.int32))


def _count(monkeypatch):
    """How often sdpa is asked for a whole step, and the kernel."""
    asked = {"sdpa": 0, "kernel": 0}
    whole, kernel = Sdpa.__call__, backend_module._attend

    def by_sdpa(*args, **kwargs):
        asked["sdpa"] += 1
        return whole(*args, **kwargs)

    def by_kernel(*args, **kwargs):
        asked["kernel"] += 1
        return kernel(*args, **kwargs)

    monkeypatch.setattr(Sdpa, "__call__", by_sdpa)
    monkeypatch.setattr(backend_module, "_attend", by_kernel)
    return asked


@pytest.mark.parametrize("why", ["two tokens", "gradient", "many", "strided", "no tail", "nothing"])
def test_what_does_not_suit_goes_to_sdpa(monkeypatch, why):
    rng = torch.Generator().manual_seed(9)
    layer = ragged(rng, [40, 11])
    batch = 49 if why == "many" else 1
    query, keys, values = step(rng, layer, 2, batch, 12)
    if why == "two tokens":
        query = query.repeat(1, 1, 2, 1)
    elif why == "gradient":
        query.requires_grad_()
    elif why == "strided":
        doubled = [torch.stack([x, x], dim=-1)[..., 0] for x in (layer.keys, layer.values)]
        layer = RaggedLayer(*doubled, layer.positions, layer.log_multiplicity, layer.offsets)
    elif why == "no tail":
        keys, values = keys[:, :, :0], values[:, :, :0]
    asked = _count(monkeypatch)
    prepared = Numba().prepare(layer)

    output = Numba()(query, prepared, keys, values, None, 0.125)

    assert asked == {"sdpa": int(why != "nothing"), "kernel": int(why == "nothing")}
    want = Eager()(query, layer, keys, values, None, 0.125)
    assert relative_error(output.detach(), want.detach()) <= TOLERANCES[torch.float32].output
    if why == "gradient":
        output.sum().backward()
        assert bool(query.grad.isfinite().all())


@pytest.mark.parametrize(
    "change",
    [
        lambda query, keys, values: (query[..., :32], keys, values),
        lambda query, keys, values: (query[:, :3], keys, values),
        lambda query, keys, values: (query[:1], keys, values),
        lambda query, keys, values: (query, keys[:, :1], values[:, :1]),
        lambda query, keys, values: (query, keys[..., :32], values[..., :32]),
        lambda query, keys, values: (query, keys, values[:, :, :5]),
        lambda query, keys, values: (query, keys, values.half()),
        lambda query, keys, values: (query.half(), keys, values),
        lambda query, keys, values: (query, keys.to("meta"), values.to("meta")),
    ],
)
def test_addresses_are_only_read_where_everything_fits(monkeypatch, change):
    rng = torch.Generator().manual_seed(16)
    layer = ragged(rng, [40, 11])
    asked = step(rng, layer, 2, 2, 12)
    query, keys, values = change(*asked)
    monkeypatch.setattr(Sdpa, "__call__", lambda *args: "sdpa")
    prepared = Numba().prepare(layer)

    assert Numba()(query, prepared, keys, values, None, 0.125) == "sdpa"
    assert torch.is_tensor(Numba()(asked[0], prepared, *asked[1:], None, 0.125))


def test_splits_serve_all_steps_of_a_batch_and_then_make_room():
    layer = ragged(torch.Generator().manual_seed(10), [90, 60, 30, 20], sequences=2)
    held = Numba().prepare(layer).splits
    first = held.splits(2, 6, None)

    assert held.splits(2, 6, None) is first
    swapped = held.splits(2, 6, torch.tensor([1, 0]))
    assert swapped.continuations.tolist() == [1, 0]
    assert held.splits(2, 6, torch.tensor([1, 0])) is swapped
    assert held.held_bytes == swapped.held_bytes
    # A sequence without continuations is not read.
    only = held.splits(1, 6, torch.tensor([1]))
    assert int(only.splits[:, 0].min()) == 2
    assert int((only.splits[:, 2] - only.splits[:, 1]).sum()) == 50


def test_held_bytes_are_the_tables_of_splits():
    layer = ragged(torch.Generator().manual_seed(11), [90, 60])
    backend, prepared = Numba(), Numba().prepare(layer)
    assert backend.held_bytes(prepared) == 0

    backend.warm_up(prepared, 4)

    made = prepared.splits.splits(1, 4, None)
    tables = (
        made.splits, made.row_splits, made.sequence_start, made.continuations, made.sequence_of
    )  # fmt: skip
    assert backend.held_bytes(prepared) == 8 * sum(x.numel() for x in tables) + len(made.args)
    backend.packed(torch.zeros(1, 4, 1, 64), prepared, 1.0)
    assert backend.held_bytes(prepared) > made.held_bytes  # and sdpa's windows


def test_a_group_too_large_for_the_kernel_warms_up_the_windows():
    layer = ragged(torch.Generator().manual_seed(12), [90])
    prepared = Numba().prepare(layer)

    Numba().warm_up(prepared, 97)

    assert prepared.windows.held_bytes > 0
    assert prepared.splits.held_bytes == 0


def _without_numba(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "numba" else found(name)
    )


def test_auto_takes_it_on_the_cpu_and_says_why_where_not(monkeypatch):
    assert Auto().resolve(CPU, torch.float32, 64) == Numba()
    assert Auto().resolve(CPU, torch.float64, 64) == Sdpa()
    assert Auto().describe("cpu").startswith("auto -> numba on cpu: ")
    assert "Not" not in Auto().describe("cpu")

    _without_numba(monkeypatch)

    assert Auto().resolve(CPU, torch.float32, 64) == Sdpa()
    line = Auto().describe("cpu")
    assert line.startswith("auto -> sdpa on cpu: ")
    assert "Not numba: numba is not installed. Run: pip install 'gracekv[cpu]'" in line


def test_it_is_refused_where_it_cannot_run(monkeypatch, threads):
    layer = ragged(torch.Generator().manual_seed(14), [9])
    doubled = RaggedLayer(
        layer.keys.double(), layer.values.double(), *(layer.positions, layer.log_multiplicity),
        layer.offsets,
    )  # fmt: skip
    with pytest.raises(BackendUnavailableError, match=r"got torch.float64. Use backend 'sdpa'"):
        Numba().prepare(doubled)
    assert "the kernel is for CPUs" in Numba().obstacle(torch.device("meta"))
    threads(2)
    monkeypatch.setattr(omp_threads, "_parallel", lambda: None)
    with pytest.raises(BackendUnavailableError, match=r"Call torch.set_num_threads\(1\)"):
        Numba().prepare(layer)
    threads(1)
    Numba().prepare(layer)
    _without_numba(monkeypatch)
    with pytest.raises(BackendUnavailableError, match="numba is not installed"):
        Numba().prepare(layer)
