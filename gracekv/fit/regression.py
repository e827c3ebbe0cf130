"""`regression`: values, then keys, by ridge regression with bounded changes (GRKV)."""

from __future__ import annotations

from dataclasses import field, replace

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.fit.attended import LayerAttention, Reference, kept_attention, scatter
from gracekv.fit.base import FITTERS, ReferenceQueries
from gracekv.fit.values import QueryFitter, ridge
from gracekv.prefill import LayerCapture, Region
from gracekv.registry import bounded
from gracekv.value import Memory, Replay

# Total weight of a query head's queries; maximum conjugate gradient steps, and the relative
# residual norm at which they stop.
_WEIGHT, _STEPS, _TOLERANCE = 6.0, 16, 1e-6


@FITTERS.register("regression")
class Regression(QueryFitter):
    r"""Ridge regression of values, then of keys, towards the full attention's output (GRKV).

    Let p be the attention of a reference query over the kept entries and o its output over all
    tokens. The change X of the values minimises the weighted sum of |p (V + X) - o|^2 plus
    penalty |X|^2; the dual system is solved. The keys follow, linearised at the new values, by 16
    steps of conjugate gradients over the layer. Each head's change is scaled down to a fixed share
    of the norm of its values or keys, and further if rounding would exceed that. The layer then
    keeps the best of three candidates: no change, new values, or new values and keys. The best has
    the least error of its actual (nonlinear) output plus the penalty of its changes.

    Source: Peng et al. (2026), GRKV, arXiv:2605.31105, with the numbers of its code. Ours: queries
    are evenly spaced and include both ends, and the fixed entries are those that the reference
    queries read most, not those with the highest scores.

    Cost: the attention of the reference queries over all keys, O(L H Q T d), a system of Q H/G
    unknowns for each head, and 32 products of the queries with the entries.

    Attributes:
        queries: reference queries; by default 32 of the context, moved to the prompt's end.
        penalty: weight of squared changes (0.01).
        value_cap: largest change of a head's values, as a share of their norm (0.1).
        key_cap: largest change of a head's keys, as a share of their norm (0.025).
        guard: share of a head's entries that are not changed (0.1).
    """

    # The three candidates are compared for a whole layer.
    by_head = False

    queries: ReferenceQueries = field(
        default_factory=lambda: ReferenceQueries(Replay(uniform_weight=1.0, max_queries=32), 0)
    )
    penalty: float = bounded(0.01, above=0)
    value_cap: float = bounded(0.1, above=0)
    key_cap: float = bounded(0.025, above=0)
    guard: float = bounded(0.1, at_least=0, below=1)

    def reference(self, capture: LayerCapture, region: Region, memory: Memory) -> Reference:
        found = super().reference(capture, region, memory)
        return replace(found, weights=_WEIGHT * capture.group * found.weights)

    def layer(self, packed: RaggedEntries, reference: Reference, region: Region) -> RaggedEntries:
        attention = kept_attention(reference, packed, region)
        shares, free = attention.shares(), self._free(attention)
        error = attention.output - attention.apply(shares, attention.values)
        change = ridge(shares, error, attention.weights, free / self.penalty)
        values = bounded_move(packed.values, change, attention, free, self.value_cap)
        fitted = replace(packed, values=values)
        # Mask the coordinates that a passage adds to its keys: they are 0 in packed keys.
        masked = replace(reference, asked=reference.asked * packed.keys.any(dim=0))
        change = key_change(kept_attention(reference, fitted, region), masked, free, self.penalty)
        keys = bounded_move(packed.keys, change, attention, free, self.key_cap)

        def objective(candidate: RaggedEntries) -> float:
            trial = kept_attention(reference, candidate, region)
            lost = (trial.apply(trial.shares(), trial.values) - trial.output).square().sum(dim=-1)
            pairs = ((candidate.keys, packed.keys), (candidate.values, packed.values))
            move = sum((new.float() - old.float()).square().sum() for new, old in pairs)
            return float(((lost * trial.weights).sum() + self.penalty * move).nan_to_num(torch.inf))

        return min(packed, fitted, replace(fitted, keys=keys), key=objective)

    def _free(self, attention: LayerAttention) -> Tensor:
        """float32 [G, W]: 1 for entries that may change, else 0."""
        mass = (attention.shares() * attention.weights[..., None]).sum(dim=1)
        ranks = mass.masked_fill_(~attention.free, -1.0).argsort(dim=1, descending=True).argsort()
        fixed = (attention.free.sum(dim=1, keepdim=True) * self.guard).long()
        return (attention.free & (ranks >= fixed)).float()


def key_change(attn: LayerAttention, reference: Reference, free: Tensor, penalty: float) -> Tensor:
    """The ridge solution for keys, float32 [G, W, d], by conjugate gradients on its dual."""
    shares, queries, root = attn.shares(), reference.asked, attn.weights.sqrt()[..., None]
    output, moving = attn.apply(shares, attn.values), shares * free[:, None]

    def forward(change: Tensor) -> Tensor:
        shifted = moving * (queries @ change.mT)
        return root * (shifted @ attn.values - shifted.sum(dim=-1, keepdim=True) * output)

    def adjoint(rows: Tensor) -> Tensor:
        rows = root * rows
        inner = rows @ attn.values.mT - (rows * output).sum(dim=-1, keepdim=True)
        return (moving * inner).mT @ queries

    residual = root * (attn.output - output)
    dual, along, square = torch.zeros_like(residual), residual, residual.square().sum()
    least = _TOLERANCE**2 * square
    for _ in range(_STEPS):
        if bool(square <= least):
            break
        image = forward(adjoint(along)) + penalty * along
        rate = square / (along * image).sum()
        dual, residual = dual + rate * along, residual - rate * image
        last_square, square = square, residual.square().sum()
        along = residual + square / last_square * along
    return adjoint(dual)


def bounded_move(
    numbers: Tensor, change: Tensor, attention: LayerAttention, free: Tensor, cap: float
) -> Tensor:
    """`numbers` [E, d] plus `change` [G, W, d], at most `cap` times each head's free norm."""
    old, mask = numbers.float()[attention.columns], free[..., None]
    change, limit = mask * change, cap * (mask * old).norm(dim=(1, 2), keepdim=True)
    scale = (limit / change.norm(dim=(1, 2), keepdim=True).clamp_min(1e-30)).clamp(max=1.0)
    # Rounding to the cache's dtype may exceed the limit; if a head still does, it is not changed.
    for shrink in (0.9, 0.9, 0.9, 0.9, 0.0):
        new = (old + scale * change).to(numbers.dtype).float()
        over = (mask * (new - old)).norm(dim=(1, 2), keepdim=True) > limit
        scale = torch.where(over, shrink * scale, scale)
    return scatter(numbers, attention, old + scale * change)
