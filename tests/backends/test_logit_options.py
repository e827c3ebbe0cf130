"""Capped logits and sink logits: what they do, and backends that do not take them."""

import math
from types import SimpleNamespace

import pytest
import torch

from gracekv.backends import BACKENDS, AttentionSpec, Auto, Eager, Numba, Sdpa
from gracekv.backends.base import AttentionBackend
from gracekv.errors import BackendUnavailableError
from gracekv.hf.attention import attention
from gracekv.hf.layer import GraceLayer
from gracekv.hf.packed_layer import PackedLayer
from support.decode_steps import ragged, step

CPU = torch.device("cpu")
VARIANTS = [Eager(), Sdpa(), Sdpa(kernel="plain"), Numba()]


class Old(AttentionBackend):
    """A backend that was written without either: it has no arguments for them."""

    name = "old"
    prepare = held_bytes = packed = tail = None

    def __call__(self, query, prepared, keys, values, mask, scale, rows=None):
        return Eager()(query, prepared, keys, values, mask, scale, rows)


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
    asked = (keys, values, None, 0.5)

    one = backend(query, backend.prepare(layer), *asked, softcap=1.0)

    two = backend(query, backend.prepare(twice), *asked, softcap=1.0)
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", VARIANTS, ids=repr)
def test_a_huge_sink_takes_everything_and_a_tiny_one_nothing(backend):
    rng = torch.Generator().manual_seed(1)
    layer = ragged(rng, [20, 9])
    query, keys, values = step(rng, layer, 1, 1, 5)
    prepared, asked = backend.prepare(layer), (keys, values, None, 0.5)
    plain = backend(query, prepared, *asked)

    mixed = backend(query, prepared, *asked, sink_logits=torch.tensor([1e4, -1e4]))

    assert bool((mixed[:, 0] == 0).all())
    torch.testing.assert_close(mixed[:, 1], plain[:, 1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_auto_and_every_backend_say_what_they_take(name):
    spec = AttentionSpec(CPU, softcap=True, sink_logits=True)
    backend = BACKENDS.build(name).resolve(spec)
    if name == "auto":
        assert backend.takes_softcap
        assert backend.takes_sink_logits
    for option in ("softcap", "sink_logits"):
        obstacle = AttentionBackend.obstacle(backend, AttentionSpec(CPU, **{option: True}))
        assert (obstacle is None) == getattr(backend, f"takes_{option}")
        assert obstacle is None or "Use backend 'auto', 'sdpa' or 'eager'." in obstacle


def test_auto_passes_over_a_backend_that_does_not_take_them(monkeypatch):
    monkeypatch.setattr(Numba, "takes_softcap", False)
    assert Auto().resolve(AttentionSpec(CPU, softcap=True)) == Sdpa()
    assert Auto().resolve(AttentionSpec(CPU, sink_logits=True)) == Numba()


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

    want = Eager()(query, packed, keys, values, None, 0.5, softcap=1.5, sink_logits=sinks)
    assert torch.equal(output, want.transpose(1, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [({"softcap": 50.0}, "does not cap logits"), ({"s_aux": torch.zeros(4)}, "no sink logits")],
)
def test_a_backend_that_does_not_take_them_is_refused_by_name(given, message):
    query, packed, k, v, keys, values = states(Old())
    output, _ = attention(SimpleNamespace(), query, k, v, None, 0.5)
    assert torch.equal(output, Eager()(query, packed, keys, values, None, 0.5).transpose(1, 2))
    with pytest.raises(BackendUnavailableError, match=f"Backend 'old' cannot run.*{message}"):
        attention(SimpleNamespace(), query, k, v, None, 0.5, **given)
