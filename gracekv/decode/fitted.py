"""`fitted`: one auction over all heads, then values and masses fitted to the interval's queries."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.decode.base import DECODERS, Decoder, HeldLayer
from gracekv.fit.attended import KeptMass
from gracekv.fit.values import ridge_change
from gracekv.fit.values_and_mass import multiplicities
from gracekv.registry import bounded


@DECODERS.register("fitted")
class Fitted(Decoder):
    """What the last queries read, and before them; values and masses then make up for the rest.

    An entry's score is the attention that it got, times the norm of its value, or what it was at an
    earlier cut times `memory`, whichever is more. Values and multiplicities of what stays are then
    fitted as `gracekv.fit` does, with the recorded queries as reference: what they got from all
    entries they get from those that stay.

    Source: ours.

    Cost: attention of the recorded queries over all entries, that of the references once more, and
    for each head a system of as many unknowns as it has references, at each cut.

    Attributes:
        queries: how many of the last queries are asked.
        references: how many of them, evenly spread, are fitted to.
        memory: what an older score counts, a cut later.
        norm: power of the value's norm in the score.
        trust: prior of values, as in `gracekv.fit.Values`.
        mass_trust: prior of multiplicities.
        trust_read: prior of both for being read.
        keep_prompt: whether the prompt's entries stay.
    """

    queries: int = bounded(64, at_least=1)
    references: int = bounded(16, at_least=1)
    memory: float = bounded(0.9, at_least=0, at_most=1)
    norm: float = bounded(1.0, at_least=0)
    trust: float = bounded(0.1, above=0)
    mass_trust: float = bounded(0.1, above=0)
    trust_read: float = bounded(0.3, at_least=0)
    keep_prompt: bool = True

    def scores(self, held: HeldLayer) -> Tensor:
        read = held.attention().mean(dim=1) * held.values.float().norm(dim=-1) ** self.norm
        # Older scores count at the level that their entries have now.
        before = held.carried * (held.carried > 0)
        level = (read * (before > 0)).sum(1) / before.sum(1).clamp_min(1e-30)
        return torch.maximum(read, self.memory * level[:, None] * before)

    def fit(self, held: HeldLayer, kept: Tensor, packed: RaggedEntries) -> RaggedEntries:
        """`packed` with values and masses that give the references what all of `held` gave.

        `kept` is bool [G, N], the entries of `packed`.
        """
        step = max(1, held.moved.shape[2] // self.references)
        held = dataclasses.replace(held, moved=held.moved[:, :, ::step])
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
        factor = multiplicities(attention, self.mass_trust, self.trust_read)
        shares = attention.shares(factor)
        error = chance.div_(total[..., None]).sub_(shares) @ held.values.float()
        change = ridge_change(attention, shares, error, self.trust, self.trust_read)
        return dataclasses.replace(
            packed,
            values=(packed.values + change[kept]).to(packed.dtype),
            log_multiplicity=packed.log_multiplicity + factor[kept].log(),
        )
