"""The kernel that reads codes, interpreted, against float64 attention over dequantised entries."""

import math

import pytest
import torch
from hypothesis import given, settings

from gracekv.backends import AttentionStep, Eager, Triton
from gracekv.backends.reference import attention
from gracekv.cache.entries import CompressedCache
from gracekv.cache.quantised import dequantised
from gracekv.testing.attention import TOLERANCES, relative_error
from support.covering import LONG
from support.decode_steps import packed_alone
from support.draws import SEEDS, bools, ints, lists, some
from support.quantised_layers import of_mixed_widths, of_two_passages, quantised

BACKEND = Triton(processors=3)


def rounding(layer, query, scale):
    """The largest error of a logit if the kernel rounds its inputs to a half dtype."""
    if query.dtype == torch.float32:
        return 0.0
    keys = dequantised(CompressedCache((layer,), 1000, (0,) * layer.sequences)).layers[0].keys
    if not len(keys):
        return 0.0
    largest = [float(x.double().norm(dim=-1).max()) for x in (query, keys)]
    return torch.finfo(query.dtype).eps / 2 * scale * largest[0] * largest[1]


def check(layer, query, keys, values, mask, rows, options):
    asked = (keys, values, 0.2, mask, None, rows)
    want, lse = attention(AttentionStep(query, layer, *asked, **options))
    prepared = BACKEND.prepare(layer)
    bound, moved = TOLERANCES[query.dtype], rounding(layer, query, 0.2)
    output = BACKEND(AttentionStep(query, prepared, *asked, **options))
    assert output.dtype == query.dtype
    assert relative_error(output, want) <= bound + 2 * moved
    assert bool((output[(lse == -math.inf).all(0)] == 0).all())


@settings(max_examples=10 if LONG else 5)
@given(
    seed=SEEDS, lengths=lists(ints(0, 100), min_size=2, max_size=2), sequences=ints(1, 2),
    copies=ints(1, 2), group=some([1, 5]), tokens=ints(1, 3), masked=bools(), shuffled=bools(),
    dim=some([16, 20, 64]), dtype=some(list(TOLERANCES)), bits=some([2, 4, 8]),
    size=some([1, 4, 32]), softcap=some([None, 1.5]), sinks=bools(),
)  # fmt: skip
def test_equals_attention_in_float64(
    seed, lengths, sequences, copies, group, tokens, masked, shuffled, dim, dtype, bits, size,
    softcap, sinks,
):  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    # For token groups, as many channels as fit.
    size = 4 if dim == 20 and size == 32 else size
    layer = quantised(rng, lengths * sequences, dim, dtype, sequences, bits=bits, group=size)
    batch, heads = sequences * copies, len(lengths)
    query = torch.randn(batch, heads * group, tokens, dim, generator=rng).to(dtype)
    tail = [torch.randn(batch, heads, tokens + 3, dim, generator=rng).to(dtype) for _ in "kv"]
    mask = torch.rand(batch, 1, tokens, tokens + 3, generator=rng) < 0.5 if masked else None
    rows = torch.randint(0, sequences, (batch,), generator=rng) if shuffled else None
    logits = torch.randn(heads * group, generator=rng) if sinks else None
    check(layer, query, *tail, mask, rows, {"softcap": softcap, "sink_logits": logits})


@pytest.mark.parametrize("size", [32, 48, 200])
def test_splits_that_begin_inside_a_block(size):
    rng = torch.Generator().manual_seed(1)
    layer = quantised(rng, [400, 9, 0, 130], 16, torch.float32, 2, group=size, stop=390)
    query = torch.randn(2, 4, 1, 16, generator=rng)
    tail = [torch.randn(2, 2, 5, 16, generator=rng) for _ in "kv"]
    check(layer, query, *tail, None, None, {"softcap": None, "sink_logits": None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("passages", [1, 2])
def test_entries_of_several_widths(dtype, passages):
    rng = torch.Generator().manual_seed(4)
    layer = quantised(rng, [30, 41, 0, 9], 16, dtype, 2, group=4)
    layer = of_mixed_widths(rng, layer, group=4)
    if passages == 2:
        layer = of_two_passages(layer, quantised(rng, [13, 0, 5, 30], 16, dtype, 2, group=4))
    query = torch.randn(2, 4, 1, 16, generator=rng).to(dtype)
    tail = [torch.randn(2, 2, 5, 16, generator=rng).to(dtype) for _ in "kv"]
    check(layer, query, *tail, None, None, {"softcap": None, "sink_logits": None})


def test_a_part_without_entries():
    rng = torch.Generator().manual_seed(2)
    query = torch.randn(1, 2, 1, 16, generator=rng)
    tail = [torch.randn(1, 2, 5, 16, generator=rng) for _ in "kv"]
    for lengths, sinks in (([0, 0], 0), ([2, 1], 2), ([50, 50], 0)):
        layer = quantised(rng, lengths, 16, torch.float32, 1, sinks=sinks)
        got = BACKEND(AttentionStep(query, BACKEND.prepare(layer), *tail, 0.2))
        want = Eager()(AttentionStep(query, Eager().prepare(layer), *tail, 0.2))
        torch.testing.assert_close(got, want)


def test_repeats_to_the_bit_and_counts_its_tables():
    rng = torch.Generator().manual_seed(3)
    layer = quantised(rng, [300, 5], 16, torch.float32, 1)
    query = torch.randn(1, 4, 1, 16, generator=rng)
    prepared = BACKEND.prepare(layer)
    step = packed_alone(query, prepared, 0.2)
    assert torch.equal(BACKEND(step), BACKEND(step))
    assert BACKEND.held_bytes(prepared) == prepared.tables.bytes
    coded = sum(x.numel() * 8 for t in prepared.tables.tables for x in (t.parts[1].items,))
    assert prepared.tables.bytes > coded > 0
