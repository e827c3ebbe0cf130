"""`fitted`: one auction over all heads; values and masses are fitted to the interval's queries."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.decode.base import DECODERS, Decoder, HeldLayer
from gracekv.fit.attended import KeptMass
from gracekv.fit.values import ridge_change
from gracekv.fit.values_and_mass import multiplicities
from gracekv.kernels.linalg import rounded
from gracekv.registry import bounded


@DECODERS.register("fitted")
class Fitted(Decoder):
    """Keep the entries that the last queries read, and fit them to compensate for the others.

    An entry's score is the attention that it received times the norm of its value, or its score at
    an earlier cut times `memory`, whichever is higher. Values and multiplicities of the entries
    that stay are then fitted as in `gracekv.fit`, with the recorded queries as references, so that
    their attention outputs stay close to those over all entries.

    Source: ours.

    Cost: at each cut, attention of the recorded queries over all entries, that of the references
    again, and one linear system per head with as many unknowns as references.

    Attributes:
        queries: how many of the last queries score the entries.
        references: at most how many of them, evenly spaced, the fit uses.
        memory: factor of an older score at the next cut.
        norm: exponent of the value's norm in the score.
        trust: prior of the values of all entries, as in `gracekv.fit.Values`.
        mass_trust: the same for multiplicities.
        trust_read: prior of an entry that the references read, for both.
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
        # Rescale older scores to the current level of their entries.
        before = held.carried * (held.carried > 0)
        level = (read * (before > 0)).sum(1) / before.sum(1).clamp_min(1e-30)
        return torch.maximum(read, self.memory * level[:, None] * before)

    def fit(self, held: HeldLayer, kept: Tensor, packed: RaggedEntries) -> RaggedEntries:
        """Refit `packed` so that the references' outputs stay close to those over all of `held`.

        `kept` is bool [G, N], the entries in `packed`.
        """
        step = max(1, -(-held.moved.shape[2] // self.references))
        held = dataclasses.replace(held, moved=held.moved[:, :, ::step])
        if not held.moved.shape[2]:
            return packed
        logits, sink = held.logits(), held.sinks()
        top = torch.maximum(logits.amax(dim=-1), sink)
        chance = logits.sub_(top[..., None]).exp_()
        sink = (sink - top).exp()
        total = chance.sum(dim=-1) + sink
        weights = total.new_full((total.shape[1],), 1 / total.shape[1])
        # All columns, with zero mass in dropped ones: few are dropped, and this avoids a copy.
        attention = KeptMass(kept, chance * kept[:, None], total, sink, weights, None)
        factor = multiplicities(attention, self.mass_trust, self.trust_read)
        shares = attention.shares(factor)
        error = chance.div_(total[..., None]).sub_(shares) @ held.values.float()
        change = ridge_change(attention, shares, error, self.trust, self.trust_read)
        values = rounded(packed.values + change[kept], packed.dtype)
        log_m = packed.log_multiplicity + factor[kept].log()
        return dataclasses.replace(packed, values=values, log_multiplicity=log_m)
