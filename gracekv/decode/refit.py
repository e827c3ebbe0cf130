"""Values and masses of what a cut leaves, fitted to the queries that were really asked."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.decode.base import HeldLayer
from gracekv.fit.attended import KeptMass
from gracekv.fit.values import value_change
from gracekv.fit.values_and_mass import multiplicities


def refitted(
    held: HeldLayer,
    kept: Tensor,
    packed: RaggedEntries,
    trust: float,
    mass_trust: float,
    trust_read: float,
) -> RaggedEntries:
    """`packed` with values and multiplicities that give the queries what all of `held` gave them.

    Args:
        held: all entries.
        kept: bool [G, N], those of `packed`.
        packed: one sequence.
        trust: as in `gracekv.fit.ValuesAndMass`, as are the others.
        mass_trust: prior of the multiplicities.
        trust_read: prior for being read.
    """
    if not held.moved.shape[2]:
        return packed
    logits, sink = held.logits(), held.sinks()
    top = torch.maximum(logits.amax(dim=-1), sink)
    chance = logits.sub_(top[..., None]).exp_()
    sink = (sink - top).exp()
    total = chance.sum(dim=-1) + sink
    weights = total.new_full((total.shape[1],), 1 / total.shape[1])
    # Every column, those that are dropped without mass: hardly any are, and nothing is copied.
    attention = KeptMass(kept, chance * kept[:, None], total, sink, weights)
    factor = multiplicities(attention, mass_trust, trust_read)
    shares = attention.shares(factor)
    error = chance.div_(total[..., None]).sub_(shares) @ held.values.float()
    change = value_change(attention, shares, error, trust, trust_read)
    return dataclasses.replace(
        packed,
        values=(packed.values + change[kept]).to(packed.dtype),
        log_multiplicity=packed.log_multiplicity + factor[kept].log(),
    )
