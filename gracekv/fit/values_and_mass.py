"""`values_and_mass`: multiplicities first, so that kept entries get their share; then values."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.errors import ConfigError
from gracekv.fit.attended import KeptMass, LayerAttention, Reference, attended, scattered
from gracekv.fit.base import FITTERS
from gracekv.fit.values import RidgeFitter, inverse_penalty, ridge, value_change
from gracekv.kernels.linalg import batched_linear, transposed
from gracekv.prefill import Region
from gracekv.registry import bounded

# Bounds of a fitted multiplicity, relative to the packed one (ours).
LEAST, MOST = 0.25, 50.0
# Steps from no change to all of it that are tried, and the weight of errors of masses beside those
# of outputs (ours).
STEPS, MASS_SHARE = 4, 0.1


@FITTERS.register("values_and_mass")
class ValuesAndMass(RidgeFitter):
    r"""Multiplicities that restore the attention mass of dropped tokens, then fitted values.

    With e_t the unnormalised attention of a reference query to kept entry t and Z its sum over all
    tokens, the multiplicities m near 1 minimise the weighted sum of |sum_t m_t e_t / Z - 1|^2: the
    question, the answer so far and the context keep the shares that they have in the full cache.
    Values are then fitted as in `values`, with these multiplicities.

    With `folds`, each head takes only as much of its change as queries that were held out agree
    with: the reference queries are dealt into `folds` parts, the fit to the others is tested on
    each part at 0, 1/4, 1/2, 3/4 and 1 of its change, and the fit to all of them keeps the share
    with the least error over all parts. A head of share 0 stays as it is.

    Source: ours; see `values`.

    Cost: that of `values`, and one more system per head; with `folds`, 1 + `folds` times that, and
    five products of attention and values for each part. Decoding reads multiplicities anyway.

    Attributes:
        mass_trust: prior of the multiplicities of all entries alike, a factor like `trust`. The
            others: see `RidgeFitter`; `trust_read` counts in both problems.
        folds: how many parts of the reference queries are held out in turn; 0 for none.
    """

    mass_trust: float = bounded(0.1, above=0)
    folds: int = bounded(0, at_least=0, hint="0 turns it off; 2 tests each half on the other.")

    def check(self) -> None:
        if self.folds == 1:
            raise ConfigError("values_and_mass.folds takes 0, or at least 2; got 1.")

    def layer(self, packed: RaggedEntries, reference: Reference, region: Region) -> RaggedEntries:
        attention = attended(reference, packed, region)
        factor, change = self._change(attention)
        if self.folds:
            share = self.agreed(attention, reference.group)
            factor, change = factor ** share[:, None], share[:, None, None] * change
        # The factor of entries that are not free is 1.
        moved = factor.flatten()[attention.place].log_()
        return dataclasses.replace(
            packed,
            values=scattered(packed.values, attention, attention.values + change),
            log_multiplicity=packed.log_multiplicity + moved,
        )

    def _change(self, attention: LayerAttention) -> tuple[Tensor, Tensor]:
        """Factors of multiplicities float32 [G, W], and the change of values [G, W, d]."""
        factor = multiplicities(attention, self.mass_trust, self.trust_read)
        trust = self.trust, self.trust_read
        return factor, value_change(attention, attention.shares(factor), *trust)

    def agreed(self, attention: LayerAttention, group: int) -> Tensor:
        """float32 [G]: the share of each head's change that held-out queries agree with.

        `group` is the number of query heads of a KV head. Of shares with equal errors the smaller.
        """
        weights = attention.weights
        queries = torch.arange(weights.shape[-1] // group, device=weights.device)
        part = queries.repeat(group) % self.folds
        errors = []
        for number in range(self.folds):
            # Queries of weight 0 take no part.
            tested = torch.where(part == number, weights, 0.0)
            factor, change = self._change(_weighed(attention, weights - tested))
            held_out = _weighed(attention, tested)
            errors += [
                held_out_error(held_out, factor ** (step / STEPS), step / STEPS * change)
                for step in range(STEPS + 1)
            ]
        total = torch.stack(errors).unflatten(0, (self.folds, -1)).sum(dim=0)
        share: Tensor = total.nan_to_num_(torch.inf).argmin(dim=0) / STEPS
        return share


def _weighed(attention: LayerAttention, weights: Tensor) -> LayerAttention:
    """`attention` with other `weights` [G, M], scaled to sum 1."""
    scaled = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-12)
    return dataclasses.replace(attention, weights=scaled)


def held_out_error(attention: LayerAttention, factor: Tensor, change: Tensor) -> Tensor:
    """float32 [G]: the weighted error of the queries' outputs and masses after a change.

    That is the squared error of outputs over their squares, and a tenth of that of masses.

    Args:
        attention: over the entries as they are.
        factor: float32 [G, W], of the multiplicities.
        change: float32 [G, W, d], of the values.
    """
    output, weights = attention.output, attention.weights
    found = batched_linear(attention.shares(factor), transposed(attention.values + change))
    lost, size = ((x.square().sum(dim=-1) * weights).sum(dim=-1) for x in (found - output, output))
    mass = torch.linalg.vecdot(attention.mass, factor[:, None]) + attention.sink
    off = ((mass / attention.total - 1.0).square() * weights).sum(dim=-1)
    error: Tensor = lost / size.clamp_min(1e-12) + MASS_SHARE * off
    return error


def multiplicities(attention: KeptMass, trust: float, trust_read: float) -> Tensor:
    """float32 [G, W]: factors of the packed multiplicities; 1 for entries that are not free."""
    shares = attention.mass / attention.total[..., None]
    on_tokens = 1.0 - (attention.sink / attention.total)[..., None]
    missing = on_tokens - shares.sum(dim=-1, keepdim=True)
    inverse = inverse_penalty(shares, attention, trust, trust_read)
    change = ridge(shares, missing, attention.weights, inverse)[..., 0]
    factor = (1.0 + change.nan_to_num_(0.0, 0.0, 0.0)).clamp_(LEAST, MOST)
    return factor.masked_fill_(~attention.free, 1.0)
