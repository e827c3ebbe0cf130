"""Every backend against attention in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.backends import AttentionStep, Eager, Numba, Sdpa
from gracekv.backends.reference import attention
from gracekv.cache.base import RaggedEntries
from gracekv.errors import BackendUnavailableError, ShapeError
from gracekv.testing.attention import TOLERANCES, relative_error

VARIANTS = [Eager(), Sdpa(), Sdpa(kernel="plain"), Numba()]


def ragged(rng, lengths, dim, dtype, bias=True, sequences=1):
    entries = sum(lengths)
    return RaggedEntries(
        keys=torch.randn(entries, dim, generator=rng).to(dtype),
        values=torch.randn(entries, dim, generator=rng).to(dtype),
        positions=torch.arange(entries, dtype=torch.int32),
        log_multiplicity=torch.rand(entries, generator=rng) * 4 * bias,
        offsets=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        sequences=sequences,
    )


def spare(x):
    """`x` as a slice of a longer buffer whose unused end is poisoned, like the growing tail."""
    buffer = x.new_full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), math.nan)
    buffer[:, :, : x.shape[2]] = x
    return buffer[:, :, : x.shape[2]]


@pytest.mark.parametrize("backend", VARIANTS, ids=repr)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    group=st.integers(1, 4),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 5),
    before=st.integers(0, 9),
    masked=st.sampled_from(["none", "bool", "float"]),
    dim=st.sampled_from([8, 20, 64]),
    dtype=st.sampled_from(list(TOLERANCES)),
    bias=st.booleans(),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
)
def test_packed_and_tail_together_equal_dense_attention(
    backend, seed, lengths, group, batch, tokens, before, masked, dim, dtype, bias, softcap, sinks
):
    rng = torch.Generator().manual_seed(seed)
    layer = ragged(rng, lengths, dim, dtype, bias)
    heads, length = layer.heads * group, before + tokens
    query = torch.randn(batch, heads, tokens, dim, generator=rng).to(dtype)
    keys, values = (
        spare(torch.randn(batch, layer.heads, length, dim, generator=rng).to(dtype))
        for _ in range(2)
    )
    mask = None
    if masked == "bool":
        mask = torch.rand(batch, 1, tokens, length, generator=rng) < 0.6
    elif masked == "float":
        mask = torch.randn(batch, 1, tokens, length, generator=rng)
    scale = dim**-0.5
    prepared = backend.prepare(layer)
    logits = torch.randn(heads, generator=rng).to(dtype) if sinks else None
    options = {"softcap": softcap, "sink_logits": logits}

    output = backend(AttentionStep(query, prepared, keys, values, scale, mask, **options))
    want, lse = attention(AttentionStep(query, layer, keys, values, scale, mask, **options))

    bound = TOLERANCES[dtype]
    assert output.dtype == dtype
    assert output.shape == query.shape
    # Three roundings to the dtype: each part's output and their mixture.
    assert relative_error(output, want) <= 2 * bound
    assert bool((output[(lse == -math.inf).all(0)] == 0).all())


@pytest.mark.parametrize("backend", VARIANTS, ids=repr)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 40), min_size=6, max_size=6) | st.just([9] * 6),
    sequences=st.sampled_from([1, 2, 3, 6]),
    repeats=st.integers(1, 3),
    shuffled=st.booleans(),
)
def test_each_row_reads_its_own_sequence(backend, seed, lengths, sequences, repeats, shuffled):
    """Six rows of entries as 1x6, 2x3, 3x2 or 6x1 sequences and heads, each alone and together."""
    rng = torch.Generator().manual_seed(seed)
    layer = ragged(rng, lengths, 8, torch.float32, sequences=sequences)
    batch = sequences * repeats
    query = torch.randn(batch, 2 * layer.heads, 2, 8, generator=rng)
    rows = torch.randint(0, sequences, (batch,), generator=rng) if shuffled else None

    tail = torch.randn(2, batch, layer.heads, 3, 8, generator=rng)

    output = backend(AttentionStep(query, backend.prepare(layer), *tail, 0.3, rows=rows))

    for row in range(batch):
        own = layer.sequence(row // repeats if rows is None else int(rows[row]))
        at = slice(row, row + 1)
        alone = Eager()(AttentionStep(query[at], own, *tail[:, at], 0.3))
        torch.testing.assert_close(output[at], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", VARIANTS, ids=repr)
def test_a_batch_that_does_not_fit_the_sequences_is_refused(backend):
    rng = torch.Generator().manual_seed(0)
    prepared = backend.prepare(ragged(rng, [4, 6], 8, torch.float32, sequences=2))
    query = torch.randn(3, 1, 1, 8, generator=rng)
    with pytest.raises(ShapeError, match="2 sequences takes a multiple"):
        backend(AttentionStep(query, prepared, query, query, 1.0))
    with pytest.raises(ShapeError, match=r"got a batch of 3 and rows \[2\]"):
        backend(AttentionStep(query, prepared, query, query, 1.0, rows=torch.tensor([0, 1])))


@pytest.mark.parametrize("backend", VARIANTS, ids=repr)
def test_long_uneven_heads_and_a_padded_start(backend):
    rng = torch.Generator().manual_seed(0)
    layer = ragged(rng, [3000, 17, 900], 64, torch.float32)
    query = torch.randn(2, 6, 1, 64, generator=rng)
    keys, values = (torch.randn(2, 3, 1500, 64, generator=rng) for _ in range(2))
    # A whole block of the fused kernel is hidden before the first visible key.
    mask = torch.ones(2, 1, 1, 1500, dtype=torch.bool)
    mask[1, :, :, :1100] = False

    output = backend(AttentionStep(query, backend.prepare(layer), keys, values, 0.125, mask))

    want, _ = attention(AttentionStep(query, layer, keys, values, 0.125, mask))
    assert relative_error(output, want) <= TOLERANCES[torch.float32]


def test_the_fused_kernel_is_refused_off_the_cpu():
    layer = ragged(torch.Generator().manual_seed(3), [4], 8, torch.float32)
    moved = RaggedEntries(
        layer.keys.to("meta"),
        layer.values.to("meta"),
        layer.positions,
        layer.log_multiplicity,
        layer.offsets,
    )
    with pytest.raises(BackendUnavailableError, match="kernel='auto' or 'plain'"):
        Sdpa(kernel="fused").prepare(moved)
