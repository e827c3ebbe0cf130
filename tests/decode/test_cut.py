"""A cut against a plain one, and entries that always stay."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.decode import DECODERS, RKV, Attention, Guarded, Random, reference
from gracekv.decode.cut import kept_entries, packed_entries
from gracekv.errors import NonFiniteError
from support.held_layers import held_layer
from support.margins import assert_same_choice

EVERY = [name for name in DECODERS if name != "none"]


def layers_of(seed, **options):
    return [held_layer(seed + 7 * n, number=n, **options) for n in range(3)]


@given(seed=st.integers(0, 2**20), capped=st.booleans(), sinks=st.booleans())
def test_attention_is_that_of_the_reference(seed, capped, sinks):
    held = held_layer(seed, softcap=2.0 if capped else None, sinks=sinks)
    own = held.attention().mean(dim=1)
    torch.testing.assert_close(own.double(), reference.attention(held), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
@given(seed=st.integers(0, 2**20), budget=st.integers(18, 60))
def test_the_auction_is_a_sorted_list(name, seed, budget):
    strategy, layers = DECODERS.build(name), layers_of(seed)
    kept, scores = kept_entries(3, layers.__getitem__, strategy, budget, window=2)
    used, third = [x.used for x in layers], budget // 3
    stays = [x.used & ((x.positions >= x.now - 2) | strategy.guarded(x, third)) for x in layers]
    want = reference.kept(scores, stays, used, budget, per_head=strategy.per_head)
    parts = [torch.stack(x) for x in (kept, want, scores)]
    shape = parts[0].shape if strategy.per_head else (1, -1)
    assert_same_choice(*(x.reshape(shape) for x in parts))
    total = sum(int(own.sum()) for own in kept)
    assert total <= budget
    assert strategy.per_head or total == min(budget, sum(int(x.used.sum()) for x in layers))


def test_equal_norms_guard_the_earliest_entries():
    held = held_layer(3, packed=(90, 90))
    held = replace(held, values=torch.ones_like(held.values))
    guarded = Guarded(DECODERS.build("recent"), share=0.5).guarded(held, 40)
    assert all(row.nonzero()[:10, 0].tolist() == list(range(10)) for row in guarded)


@pytest.mark.parametrize("name", EVERY)
def test_no_padding_stays_and_entries_are_copied(name):
    layers = layers_of(3)
    # Near float16's largest number.
    keys, values = layers[0].keys.half(), 65000 * layers[0].values.sign().half()
    layers[0] = replace(layers[0], keys=keys, values=values)
    strategy = DECODERS.build(name)
    kept, _ = kept_entries(3, layers.__getitem__, strategy, 40, window=2)
    for held, own in zip(layers, kept, strict=True):
        assert not (own & ~held.used).any()
        packed = packed_entries(held, own, strategy)
        assert torch.equal(packed.keys, held.keys[own])
        assert torch.equal(packed.positions.long(), held.positions[own])
        assert packed.lengths.tolist() == own.sum(dim=1).tolist()
        assert packed.values.isfinite().all()
        if name != "fitted":
            assert torch.equal(packed.values, held.values[own])


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
def test_scores_that_cannot_be_ranked_are_refused(monkeypatch, bad):
    monkeypatch.setattr(Random, "scores", lambda _, x: x.carried.where(x.positions != 3, bad))
    with pytest.raises(NonFiniteError, match="'random' gave scores of NaN"):
        kept_entries(3, layers_of(5).__getitem__, Random(), 45, window=2)


def test_the_prompt_stays_if_it_is_kept():
    layers = layers_of(5)
    kept, _ = kept_entries(3, layers.__getitem__, Random(), 45, window=2)
    for held, own in zip(layers, kept, strict=True):
        assert own[held.used & (held.positions < held.prompt)].all()


def test_random_scores_depend_on_seed_layer_and_position():
    held = held_layer(0)
    others = [replace(held, **x) for x in ({}, {"number": 1}, {"now": held.now + 1})]
    drawn = [Random(1).scores(held), *(Random().scores(x) for x in others)]
    assert [torch.equal(x, Random().scores(held)) for x in drawn] == [False, True, False, False]


def test_values_of_huge_norm_stay_if_they_are_guarded():
    layers = layers_of(6)
    for held in layers:
        held.values[0, 2] *= 100
        held.keys[0, 2] = -10 * held.moved[0, 0].mean(dim=0)
    plain, _ = kept_entries(3, layers.__getitem__, Attention(), 20, window=1)
    kept, _ = kept_entries(3, layers.__getitem__, Guarded(share=0.5), 20, window=1)
    assert all(own[0, 2] for own in kept)
    assert not all(own[0, 2] for own in plain)
    # Tokens that must stay come first: the last ones.
    kept, _ = kept_entries(3, layers.__getitem__, Guarded(share=0.5), 32, window=5)
    assert all(own[:, -6:-1].all() for own in kept)
    assert Guarded(RKV()).per_head


def test_before_the_first_query_what_is_carried_decides():
    held = held_layer(9, queries=0)
    held.carried.copy_(torch.arange(held.carried.numel()).view_as(held.carried))
    kept, _ = kept_entries(1, lambda _: held, Attention(), 6, window=1)
    rest = held.carried[held.used & ~kept[0]]
    assert held.carried[kept[0] & (held.positions < held.now - 1)].min() > rest.max()
