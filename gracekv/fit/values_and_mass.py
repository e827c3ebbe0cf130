"""`values_and_mass`: multiplicities, which restore attention mass, then values."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.fit.attended import KeptMass, Reference, kept_attention, scatter
from gracekv.fit.base import FITTERS
from gracekv.fit.values import RidgeFitter, ridge_change
from gracekv.prefill import Region
from gracekv.registry import bounded

# Bounds of a fitted multiplicity, relative to the packed one (ours).
LEAST, MOST = 0.25, 50.0


@FITTERS.register("values_and_mass")
class ValuesAndMass(RidgeFitter):
    r"""Multiplicities that restore the attention mass of dropped tokens, then fitted values.

    With e_t the unnormalised attention of a reference query to kept entry t and Z its sum over all
    tokens, the multiplicities m near 1 minimise the weighted sum of |sum_t m_t e_t / Z - 1|^2: the
    question, the answer so far and the context keep their shares of attention in the full cache.
    Values are then fitted as in `values`, with these multiplicities.

    Source: ours; see `values`.

    Cost: that of `values`, and one more system per head. Decoding reads multiplicities anyway.

    Attributes:
        mass_trust: prior of multiplicities common to all entries, a factor like `trust`. For the
            others see `RidgeFitter`; `trust_read` counts in both problems.
    """

    mass_trust: float = bounded(0.1, above=0)

    def layer(self, packed: RaggedEntries, reference: Reference, region: Region) -> RaggedEntries:
        attention = kept_attention(reference, packed, region)
        factor = multiplicities(attention, self.mass_trust, self.trust_read)
        fitted = self._fit_values(attention, attention.shares(factor))
        values = scatter(packed.values, attention, fitted)
        # Entries that are not free have a factor of 1.
        log_m = packed.log_multiplicity + factor.flatten()[attention.place].log_()
        return dataclasses.replace(packed, values=values, log_multiplicity=log_m)


def multiplicities(attention: KeptMass, trust: float, trust_read: float) -> Tensor:
    """float32 [G, W]: factors of the packed multiplicities; 1 for entries that are not free."""
    shares = attention.mass / attention.total[..., None]
    missing = 1.0 - (attention.sink / attention.total)[..., None] - shares.sum(dim=-1, keepdim=True)
    change = ridge_change(attention, shares, missing, trust, trust_read)[..., 0]
    factor = (1.0 + change).clamp_(LEAST, MOST)
    return factor.masked_fill_(~attention.free, 1.0)
