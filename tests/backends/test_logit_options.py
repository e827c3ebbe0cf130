"""Capped logits and sink logits: what they do, and who hands them on."""

import math
from types import SimpleNamespace

import pytest
import torch

from gracekv.backends import AttentionStep, Eager, Numba, Sdpa
from gracekv.hf.attention import attention
from gracekv.hf.layer import GraceLayer
from gracekv.hf.packed_layer import PackedLayer
from support.decode_steps import ragged, step

VARIANTS = [Eager(), Sdpa(), Sdpa(kernel="plain"), Numba()]


@pytest.mark.parametrize("backend", VARIANTS, ids=repr)
def test_multiplicity_counts_tokens_of_the_capped_logit(backend):
    """Two equal entries are one entry of multiplicity two, with a cap as without."""
    rng = torch.Generator().manual_seed(0)
    layer = ragged(rng, [20, 9])
    twice = ragged(rng, [40, 18])
    for name in ("keys", "values"):
        getattr(twice, name).copy_(getattr(layer, name).repeat_interleave(2, 0))
    twice.log_multiplicity.zero_()
    layer.log_multiplicity.fill_(math.log(2))
    query, keys, values = step(rng, layer, 3, 1, 5)
    asked = (keys, values, 0.5)

    one = backend(AttentionStep(query, backend.prepare(layer), *asked, softcap=1.0))

    two = backend(AttentionStep(query, backend.prepare(twice), *asked, softcap=1.0))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", VARIANTS, ids=repr)
def test_a_huge_sink_takes_everything_and_a_tiny_one_nothing(backend):
    rng = torch.Generator().manual_seed(1)
    layer = ragged(rng, [20, 9])
    query, keys, values = step(rng, layer, 1, 1, 5)
    prepared, asked = backend.prepare(layer), (keys, values, 0.5)
    plain = backend(AttentionStep(query, prepared, *asked))

    mixed = backend(AttentionStep(query, prepared, *asked, sink_logits=torch.tensor([1e4, -1e4])))

    assert bool((mixed[:, 0] == 0).all())
    torch.testing.assert_close(mixed[:, 1], plain[:, 1], rtol=1e-6, atol=1e-7)


def states(backend):
    rng = torch.Generator().manual_seed(2)
    packed = ragged(rng, [20, 9])
    layer = GraceLayer(PackedLayer(packed, packed, backend, 30))
    query, keys, values = step(rng, packed, 2, 1, 3)
    return query, packed, *layer.update(keys, values), keys, values


def test_the_models_attention_hands_both_to_the_backend():
    query, packed, k, v, keys, values = states(Eager())
    sinks = torch.randn(4)

    output, _ = attention(SimpleNamespace(), query, k, v, None, 0.5, softcap=1.5, s_aux=sinks)

    want = Eager()(AttentionStep(query, packed, keys, values, 0.5, softcap=1.5, sink_logits=sinks))
    assert torch.equal(output, want.transpose(1, 2))
