"""Values and masses are fitted to the keys that decoding reads, after quantisation."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from gracekv.allocate import Budget
from gracekv.fit import ReferenceQueries, ValuesAndMass
from gracekv.fit import reference as fitting
from gracekv.pipeline import Pipeline
from gracekv.precision import FullPrecision, UniformPrecision
from gracekv.precision import reference as rounding
from gracekv.testing import synthetic_prefill
from gracekv.value import Replay
from support.draws import ints, some

QUERIES = ReferenceQueries(Replay(max_queries=12), tail=3)
FIT = ValuesAndMass(QUERIES)
# Error of a float32 fit, as in tests/fit.
MARGIN = 2e-3


def runs(precision, dtype=torch.float32, **sizes):
    """The prefill, and two runs with one selection: packed only, and fitted and quantised."""
    sizes = {"layers": 2, "context": 60, "question": 3, "tail": 2, "dim": 8} | sizes
    prefill = synthetic_prefill(dtype=dtype, **sizes)
    pipeline = dataclasses.replace(Pipeline.named("gracekv-plus"), fit=FIT)
    plain = dataclasses.replace(pipeline, fit=Pipeline.named("gracekv").fit)
    coded = dataclasses.replace(pipeline, precision=precision)
    budget = Budget.entries_per_head(25)
    return prefill, plain.run(prefill, budget), coded.run(prefill, budget)


@settings(max_examples=8)
@given(seed=ints(0, 2**16), group=ints(1, 3), bits=some([4, 8]), size=some([4, 16]))
def test_equals_least_squares_over_rounded_keys_in_float64(seed, group, bits, size):
    precision = UniformPrecision(bits=bits, group=size, sinks=3)
    prefill, packed, stored = runs(precision, seed=seed, group=group)
    region = prefill.spans.region(packed.plan.recent)
    memory, trusts = {}, (FIT.trust, FIT.trust_read, FIT.mass_trust)
    for capture, layer in zip(prefill, packed.cache.layers, strict=True):
        chosen = QUERIES(capture, region, memory)
        inside = (layer.positions >= max(3, region.start)) & (layer.positions < region.end)
        counts = torch.bincount(
            torch.arange(layer.heads).repeat_interleave(layer.lengths)[inside],
            minlength=layer.heads,
        )
        read = layer.keys.double()
        (coding,) = precision.codings
        read[inside] = rounding.rounded(layer.keys[inside], counts, coding, "keys")[0]
        as_read = dataclasses.replace(layer, keys=read)
        for head in range(prefill.kv_heads):
            values, log_m = fitting.fitted_head(capture, head, as_read, region, chosen, *trusts)
            own = slice(int(layer.offsets[head]), int(layer.offsets[head + 1]))
            got = stored.cache.layers[capture.number].head(head)
            torch.testing.assert_close(got[0].double(), read[own], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[3].double(), log_m, rtol=MARGIN, atol=MARGIN)
            at = inside[own]
            count = torch.tensor([int(at.sum())])
            _, steps = rounding.rounded(values[at].float(), count, coding, "values")
            assert bool(((got[1] - values)[at].abs() <= steps / 2 + 3 * MARGIN).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_full_precision_keys_are_read_as_they_are(dtype):
    _, packed, fitted = runs(FullPrecision(), dtype, seed=1)
    widths = [torch.full((layer.entries,), 16) for layer in packed.cache.layers]
    assert FullPrecision().keys_as_read(packed.cache, widths) is packed.cache
    for before, after in zip(packed.cache.layers, fitted.cache.layers, strict=True):
        assert torch.equal(before.keys, after.keys)
        assert before.keys.dtype == after.keys.dtype == after.values.dtype == dtype
