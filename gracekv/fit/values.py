"""`values`: values of kept entries fitted by ridge regression."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gracekv.cache.base import PARTS, RaggedCache, RaggedEntries
from gracekv.cache.quantised import batches, copied
from gracekv.fit.attended import KeptMass, LayerAttention, Reference, kept_attention, scatter
from gracekv.fit.base import FITTERS, Fitter, ReferenceQueries
from gracekv.kernels.linalg import batched_linear, transposed
from gracekv.prefill import LayerCapture, Needs, Prefill, Region
from gracekv.registry import bounded
from gracekv.value import Memory

# Bytes of logits of the layers that are fitted together on a GPU.
_BATCH = 192 * 2**20
# Rows of queries above which a CPU fits one head at a time.
_ROWS = 192


@dataclass(frozen=True)
class QueryFitter(Fitter):
    """Fits to the attention outputs of reference queries over all tokens of a layer.

    Attributes:
        queries: reference queries and their weights.
        by_head: whether heads are fitted independently, so that layers may be fitted together.
    """

    works_sharded: ClassVar[bool] = True
    by_head: ClassVar[bool] = True

    queries: ReferenceQueries = field(default_factory=ReferenceQueries)

    @property
    def compares_layers(self) -> bool:
        return self.queries.replay.compares_layers

    def needs(self) -> Needs:
        """The needs of the reference queries."""
        return self.queries.needs()

    def asks(self, prefill: Prefill, region: Region, memory: Memory) -> Tensor:
        return self.queries.asks(prefill, region, memory)

    def reference(self, capture: LayerCapture, region: Region, memory: Memory) -> Reference:
        return Reference.of(capture, self.queries(capture, region, memory))

    def layers(self, cache: RaggedCache, references: list[Any], region: Region) -> RaggedCache:
        if not self.by_head:
            return super().layers(cache, references, region)
        most, fitted = _BATCH // (4 * references[0].asked.shape[1]), []
        for some in batches(cache.layers, lambda x: x.heads * int(x.lengths.max()), most):
            layers = cache.layers[some]
            reference = Reference.stack([references.pop(0) for _ in layers])
            packed = RaggedEntries.stack(layers)
            parts = [(packed, reference)]
            if packed.device.type == "cpu" and reference.asked.shape[1] > _ROWS:
                # Head by head without padding; with few rows, products are too small for this to
                # pay.
                rows = [packed.rows(g, g + 1) for g in range(len(packed.lengths))]
                parts = list(zip(rows, reference.heads(), strict=True))
            done = [self.layer(part, ref, region) if part.entries else part for part, ref in parts]
            together, sizes = RaggedEntries.stack(done), [layer.entries for layer in layers]
            # Copy the tensors that changed: views would keep whole batches.
            pairs = [(fit, old) for fit, (old, _) in zip(done, parts, strict=True)]
            new = [x for x in PARTS if any(getattr(a, x) is not getattr(b, x) for a, b in pairs)]
            copies = (copied(getattr(together, x).split(sizes)) for x in new)
            for layer, *tensors in zip(layers, *copies, strict=True):
                fitted.append(replace(layer, **dict(zip(new, tensors, strict=True))))
        return replace(cache, layers=tuple(fitted))


@dataclass(frozen=True)
class RidgeFitter(QueryFitter):
    """Fits by ridge regression towards the original values.

    Attributes:
        trust: prior common to all entries; a larger one keeps values closer to the originals.
        trust_read: prior of an entry, proportional to how much the reference queries read it.
        by_score: whether `trust_read` is proportional to the entry's squared score instead of the
            attention of reference queries, which may not include the few queries that look up an
            entry.
    """

    trust: float = bounded(0.1, above=0, hint="0.1 changes values slightly, 0.01 a lot.")
    trust_read: float = bounded(0.3, at_least=0)
    by_score: bool = field(default=False, kw_only=True)  # type: ignore[misc]

    def _fit_values(self, attention: LayerAttention, shares: Tensor) -> Tensor:
        """The values float32 [G, W, d] that give the output under `shares` [G, M, W]."""
        error = attention.output - attention.apply(shares, attention.values)
        change = ridge_change(attention, shares, error, self.trust, self.trust_read)
        return attention.values + change


@FITTERS.register("values")
class Values(RidgeFitter):
    r"""Values close to the originals that reproduce full attention's output for expected queries.

    With p the attention of a reference query over the kept entries and o its output over all
    tokens, the change X of the values minimises the weighted sum of |p (V + X) - o|^2 plus
    sum_t lambda_t |x_t|^2, per layer and KV head. With a_t the weighted mean square of p_t over the
    reference queries and a the mean of a_t over entries, lambda_t = trust * a + trust_read * a_t:
    an entry that they read keeps its own value, which the answer may quote; the others may change.
    With `by_score`, a_t is a s_t^2 over the mean of s^2, where s_t is the score of the entry.

    Source: ours. The problem is that of Attention Matching (arXiv:2602.16284) and GRKV
    (arXiv:2605.31105); reference queries, weights and prior are our own.

    Cost: attention of the reference queries over all keys, O(L H Q T d), and for each head a system
    with as many unknowns as entries or query rows, whichever is smaller.

    Attributes: see `RidgeFitter`.
    """

    def layer(self, packed: RaggedEntries, reference: Reference, region: Region) -> RaggedEntries:
        attention = kept_attention(reference, packed, region)
        values = scatter(packed.values, attention, self._fit_values(attention, attention.shares()))
        return replace(packed, values=values)


def ridge_change(
    attention: KeptMass, shares: Tensor, error: Tensor, trust: float, trust_read: float
) -> Tensor:
    """float32 [G, W, d]: the change of values for which outputs change by `error`.

    Args:
        attention: the reference queries' attention in this layer.
        shares: p float32 [G, M, W], attention over the kept entries.
        error: float32 [G, M, d], the error of the queries' outputs with the current values.
        trust: prior of all entries, as in `Values`.
        trust_read: prior of an entry, proportional to how much it is read.
    """
    inverse = inverse_penalty(shares, attention, trust, trust_read)
    return ridge(shares, error, attention.weights, inverse).nan_to_num_(0.0, 0.0, 0.0)


def inverse_penalty(shares: Tensor, attention: KeptMass, trust: float, trust_read: float) -> Tensor:
    """1 / lambda, float32 [G, W]; 0 for columns that must not change.

    Args:
        shares: p float32 [G, M, W].
        attention: has the weights and the mask of free entries.
        trust: factor of the mean diagonal of the head's normal matrix over free entries.
        trust_read: factor of the entry's own diagonal, or of its share of their sum by squared
            scores.
    """
    # sum_r w_r p_rt^2 as a matrix product, several times faster on a CPU than a sum over rows.
    power = (attention.weights.expand(*shares.shape[:2])[:, None] @ shares.square())[:, 0]
    total = power.masked_fill_(~attention.free, 0.0).sum(dim=1, keepdim=True)
    mean = total / attention.free.sum(dim=1, keepdim=True).clamp_min(1)
    if attention.scores is not None:
        power = attention.scores * total
    # Without any attention there is nothing to fit, and values do not change under any penalty.
    penalty = torch.where(mean > 0, trust * mean + trust_read * power, 1.0)
    return penalty.reciprocal_().masked_fill_(~attention.free, 0.0)


def ridge(shares: Tensor, target: Tensor, weights: Tensor, inverse_penalty: Tensor) -> Tensor:
    """Ridge regression towards no change: x float32 [G, W, d] of G independent problems.

        minimise  sum_r w_r |(A x)_r - b_r|^2 + sum_c lambda_c |x_c|^2

    by normal equations in W unknowns, or in M if there are fewer rows than columns. Products are
    computed in float32, the systems are solved in float64. A column of zeros, or with an infinite
    penalty, gets 0. With S = Lambda^-1/2, x = S (S A^T W A S + I)^-1 S A^T W b, or x = S^2 A^T
    W^1/2 (W^1/2 A S^2 A^T W^1/2 + I)^-1 W^1/2 b.

    Source: ours (Tikhonov regularisation; the dual form is the push-through identity).

    Args:
        shares: A float32 [G, M, W].
        target: b float32 [G, M, d].
        weights: w float32 [M] or [G, M], non-negative.
        inverse_penalty: 1 / lambda float32 [G, W], at least 0.
    """
    root = weights.sqrt()[..., None]
    rows, scaled = root * target, shares * root
    if shares.shape[2] <= shares.shape[1]:
        scale = inverse_penalty.sqrt()
        design = scaled * scale[:, None]
        return scale[..., None] * _solve(design.mT @ design, design.mT @ rows)
    # Only one factor has the penalty: a product of two different matrices is as fast.
    damped = scaled * inverse_penalty[:, None]
    return batched_linear(transposed(_solve(batched_linear(damped, scaled), rows)), damped.mT).mT


def _solve(gram: Tensor, right: Tensor) -> Tensor:
    """(gram + I)^-1 right in float64, for positive semidefinite gram [G, n, n]; as `right`.

    0 for a head whose matrix is not finite, so that it is not changed.
    """
    matrix = gram.double()
    matrix.diagonal(dim1=1, dim2=2).add_(1.0)
    # Unchecked, since a check would synchronise with the GPU, as batched `cholesky_solve` in MAGMA
    # does.
    factor, failed = torch.linalg.cholesky_ex(matrix)
    half = torch.linalg.solve_triangular(factor, right.double(), upper=False)
    solution: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True).to(right.dtype)
    return solution.masked_fill_(failed[:, None, None] != 0, 0.0)
