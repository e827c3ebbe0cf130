"""Capped logits and sink logits: what they do, and who hands them on."""

from types import SimpleNamespace

import torch

from gracekv.backends import AttentionStep, Eager
from gracekv.hf.attention import attention
from gracekv.hf.layer import GraceLayer
from gracekv.hf.packed_layer import PackedLayer
from support.decode_steps import ragged, step


def states(backend):
    rng = torch.Generator().manual_seed(2)
    packed = ragged(rng, [20, 9])
    layer = GraceLayer(PackedLayer(packed, packed, backend, 30))
    query, keys, values = step(rng, packed, 2, 1, 3)
    return query, packed, *layer.update(keys, values), keys, values


def test_the_models_attention_hands_both_to_the_backend():
    query, packed, k, v, keys, values = states(Eager())
    sinks = torch.randn(4)

    options = {"softcap": 1.5, "s_aux": sinks}
    output, _ = attention("sdpa", SimpleNamespace(), query, k, v, None, 0.5, **options)

    want = Eager()(AttentionStep(query, packed, keys, values, 0.5, softcap=1.5, sink_logits=sinks))
    assert torch.equal(output, want.transpose(1, 2))
