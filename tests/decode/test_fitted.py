"""The fit at a cut against the same in float64, head by head."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from gracekv.decode import Attention, Fitted, reference
from gracekv.decode.cut import packed_entries
from gracekv.fit.attended import KeptMass
from gracekv.fit.values_and_mass import LEAST, MOST
from support.draws import bools, ints, some
from support.held_layers import held_layer

TRUST, MASS_TRUST, TRUST_READ = 0.1, 0.2, 0.3


def ridge(rows, target, trust):
    """The change of each column that explains `target`, with equal weights of all rows."""
    read = rows.square().mean(dim=0)
    normal = rows.T @ rows / len(rows) + (trust * read.mean() + TRUST_READ * read).diag()
    return torch.linalg.solve(normal, rows.T @ target / len(rows))


def plain_head(held, kept, g):
    """Values and log m of the kept entries of one head, float64."""
    sinks = torch.zeros(held.moved.shape[1], dtype=torch.float64)
    if held.sink_logits is not None:
        sinks = held.sink_logits.double().view(len(held.keys), -1)[g].exp()
    rows, values = [], held.values[g].double()
    for own, sink in zip(held.moved[g].double(), sinks, strict=True):
        for query in own:
            logits = held.keys[g].double() @ query
            if held.softcap is not None:
                logits = held.softcap * torch.tanh(logits / held.softcap)
            mass = (logits + held.log_multiplicity[g].double()).exp()
            rows.append(torch.cat([mass, sink[None]]) / (mass.sum() + sink))
    given_to = torch.stack(rows)
    sink, attention = given_to[:, -1:], given_to[:, :-1]
    shares = attention[:, kept[g]]
    lost = 1 - sink - shares.sum(dim=1, keepdim=True)
    factor = (1 + ridge(shares, lost, MASS_TRUST)[:, 0]).clamp(LEAST, MOST)
    shares = shares * factor
    shares = shares / (shares.sum(dim=1, keepdim=True) + sink)
    own = values[kept[g]]
    change = ridge(shares, attention @ values - shares @ own, TRUST)
    return own + change, held.log_multiplicity[g, kept[g]].double() + factor.log()


@given(seed=ints(0, 2**20), memory=some([0.0, 0.5, 0.9]), norm=some([0.0, 1.0, 2.0]))
def test_scores_are_what_is_read_or_remembered(seed, memory, norm):
    held, rng = held_layer(seed), torch.Generator().manual_seed(seed)
    held = replace(held, carried=torch.randn(held.used.shape, generator=rng) * held.used)
    read = reference.attention(held) * held.values.double().norm(dim=-1) ** norm
    got = Fitted(memory=memory, norm=norm).scores(held)
    for own, now, old in zip(got.double(), read, held.carried.double().clamp(min=0), strict=True):
        level = now[old > 0].sum() / old.sum() if old.any() else 0.0
        torch.testing.assert_close(own, now.maximum(memory * level * old), rtol=1e-4, atol=1e-6)


def test_at_most_that_many_references_are_used(monkeypatch):
    held = held_layer(0, queries=12, packed=(12, 7))
    packed, seen = packed_entries(held, held.used, Attention()), []
    monkeypatch.setattr(
        "gracekv.decode.fitted.KeptMass",
        lambda *parts: (seen.append(parts[1]), KeptMass(*parts))[1],
    )
    for count in (1, 5, 7, 12):
        Fitted(references=count).fit(held, held.used, packed)
    assert [len(mass[0]) // 2 for mass in seen] == [1, 4, 6, 12]


@pytest.mark.parametrize("queries", [3, 12])
@given(seed=ints(0, 2**20), softcap=some([None, 3.0]), sinks=bools())
def test_fitted_entries_are_those_of_plain_least_squares(queries, seed, softcap, sinks):
    held = held_layer(seed, queries=queries, packed=(12, 7), softcap=softcap, sinks=sinks)
    rng = torch.Generator().manual_seed(seed)
    kept = held.used & (torch.rand(held.used.shape, generator=rng) < 0.7)
    kept[:, 0] = True
    packed = packed_entries(held, kept, Attention())
    strategy = Fitted(references=64, trust=TRUST, mass_trust=MASS_TRUST, trust_read=TRUST_READ)
    fitted = strategy.fit(held, kept, packed)
    assert torch.equal(fitted.keys, packed.keys)
    assert torch.equal(fitted.offsets, packed.offsets)
    for g in range(2):
        own = slice(int(packed.offsets[g]), int(packed.offsets[g + 1]))
        got = fitted.values[own].double(), fitted.log_multiplicity[own].double()
        torch.testing.assert_close(got, plain_head(held, kept, g), rtol=2e-3, atol=2e-4)
