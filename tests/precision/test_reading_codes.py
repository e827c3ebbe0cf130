"""Backends read quantised layers: equal to float64 attention over the dequantised entries."""

import dataclasses
import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings

from gracekv.backends import AttentionSpec, AttentionStep, Auto, Eager, Numba, Sdpa, sdpa, split_kv
from gracekv.backends.reference import attention
from gracekv.cache import RaggedCache, dequantised
from gracekv.cache.coded import CodedEntries
from gracekv.errors import BackendUnavailableError
from gracekv.hf.packed_layer import PackedLayer
from gracekv.precision import UniformPrecision
from gracekv.prefill import Region
from gracekv.testing.attention import TOLERANCES, relative_error
from support.draws import DTYPES, SEEDS, bools, ints, lists, some
from support.quantised_layers import layer_of, of_mixed_widths, of_two_passages, quantised


@settings(max_examples=30)
@given(
    seed=SEEDS, lengths=lists(ints(0, 3) | ints(0, 90), min_size=1, max_size=3),
    sequences=ints(1, 2), repeats=ints(1, 2), group=some([1, 3]), tokens=some([1, 1, 4]),
    masked=bools(), shuffled=bools(), dim=some([16, 64]), dtype=DTYPES,
    bits=some([2, 4, 8, "mixed", "passages"]), size=some([1, 8, 32]), most=some([5, 16, 256]),
    softcap=some([None, 1.5]), sinks=bools(),
)  # fmt: skip
def test_equal_attention_in_float64(
    seed, lengths, sequences, repeats, group, tokens, masked, shuffled, dim, dtype, bits, size,
    most, softcap, sinks,
):  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    fields = {"group": size}
    shape = (lengths * sequences, dim, dtype, sequences)
    layer = quantised(rng, *shape, bits=8 if isinstance(bits, str) else bits, **fields)
    if bits in ("mixed", "passages"):
        layer = of_mixed_widths(rng, layer, **fields)
    if bits == "passages":
        layer = of_two_passages(layer, quantised(rng, *shape, **fields))
    batch, kv_heads = sequences * repeats, len(lengths)
    query = torch.randn(batch, kv_heads * group, tokens, dim, generator=rng).to(dtype)
    tail_keys, tail_values = (
        torch.randn(batch, kv_heads, tokens + 3, dim, generator=rng).to(dtype) for _ in "kv"
    )
    rows = torch.randint(0, sequences, (batch,), generator=rng) if shuffled else None
    mask = None
    if masked:
        mask = torch.rand(batch, 1, tokens, tokens + 3, generator=rng) < 0.5
    asked = (tail_keys, tail_values, dim**-0.5, mask, None, rows)
    logits = torch.randn(kv_heads * group, generator=rng) if sinks else None
    options = {"softcap": softcap, "sink_logits": logits}
    want, lse = attention(AttentionStep(query, layer, *asked, **options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_kv, "_ENTRIES", most)
        patch.setattr(sdpa, "_PIECE", most)
        for backend in (Eager(), Sdpa(), Sdpa(kernel="plain"), Numba()):
            output = backend(AttentionStep(query, backend.prepare(layer), *asked, **options))
            assert output.dtype == dtype
            # Three roundings to the dtype: the output of each part, and their combination.
            assert relative_error(output, want) <= 2 * TOLERANCES[dtype], backend
            assert bool((output[(lse == -math.inf).all(0)] == 0).all())


def test_all_passages_are_dequantised_at_once(monkeypatch):
    rng = torch.Generator().manual_seed(5)
    parts = [quantised(rng, [40, 9], 16, torch.float32, 1, bits=8 >> n % 2) for n in range(12)]
    layer = reduce(of_two_passages, parts)
    read, calls = CodedEntries.numbers, []
    monkeypatch.setattr(
        CodedEntries, "numbers", lambda self, *at: calls.append(self.coding) or read(self, *at)
    )
    query, tail = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    with torch.device("meta"):  # as a program's default device
        Sdpa()(AttentionStep(query, Sdpa().prepare(layer), tail, tail, 0.25))
        assert [coding.bits for coding in calls] == [8, 4]
        assert len(layer.dequantised().keys) == int(layer.lengths.sum())
    assert len(calls) == 4


def test_a_step_over_several_passages_compiles_as_one_graph():
    rng = torch.Generator().manual_seed(5)
    layer = reduce(of_two_passages, [quantised(rng, [9, 4], 16, torch.float32, 1)] * 3)
    query, tail, backend = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 3, 16), Sdpa()
    held = backend.prepare(layer)

    def step(query):
        return backend(AttentionStep(query, held, tail, tail, 0.25))

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query), step(query))
    torch._dynamo.reset()


def test_auto_takes_a_backend_that_reads_codes():
    layer = quantised(torch.Generator().manual_seed(3), [9], 16, torch.float32, 1)
    spec = AttentionSpec.of(layer)
    assert Auto().resolve(spec) == Numba()
    assert Auto().resolve(dataclasses.replace(spec, dtype=torch.float64)) == Sdpa()
    assert PackedLayer.all_of([layer], Auto(), 9)[0].backend == Numba()


def test_a_backend_that_cannot_read_codes_says_so(monkeypatch):
    monkeypatch.setattr(Eager, "obstacle", lambda *_: "It does not read codes.")
    layer = quantised(torch.Generator().manual_seed(4), [9], 16, torch.float32, 1)
    with pytest.raises(BackendUnavailableError, match=r"'eager' cannot run\. It does not read"):
        PackedLayer.all_of([layer], Eager(), 9)


def test_the_largest_numbers_of_float16_stay_finite():
    layer = layer_of(torch.Generator(), [9], dtype=torch.float16)
    layer.values[:] = torch.linspace(0, 65504, 8)
    precision, cache = UniformPrecision(bits=4, group=8, sinks=0), RaggedCache((layer,), 1000, (0,))
    coded = precision(cache, [precision.widths(layer.positions, Region(0, 9))])
    assert dequantised(coded).layers[0].values.isfinite().all()
