"""`cam`: values of dropped tokens are added, at random, to the tokens after them."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gracekv.cache.base import PACKERS, LayerToPack, Packer, RaggedEntries
from gracekv.cache.evict import best_tokens, kept_in_context
from gracekv.kernels.linalg import rounded, running_sums
from gracekv.prefill import Needs
from gracekv.registry import bounded
from gracekv.value.column_sums import ColumnSums, ReceivedAttention

# Tokens that `replayed` solves for at once: few steps with small triangular systems.
_BLOCK = 128


@PACKERS.register("cam")
class CamPacker(Packer):
    r"""Adds the values of dropped tokens, at random, to the 32 context tokens after them (CaM).

    Keys do not change. Dropped tokens are processed from first to last, as the per-step policy
    would drop them. Token t draws M_t ~ Bernoulli(p_t) and adds M_t v_t / m_t to the value of each
    of the next m_t context tokens, kept or not; v_t already includes additions from earlier tokens.
    Then the kept tokens are gathered. Let A_t be the attention that token t received (column sums,
    averaged over a KV head's group) and m_t = min(merge, N - 1 - t). Then

        p_t = clamp(A_t / mean(A_{t+1}, ..., A_{t+m_t}), 0, 1).

    Tokens that receive no addition keep their exact bits. The selection decides which tokens stay;
    a node of several tokens keeps the one with the highest score, as in `evict`. Recent tokens may
    receive additions, too.

    Source: Zhang et al. (2024), CaM, ICML, Eq. 14 and Algorithm 1. Ours: everything happens once
    after prefill, and dropped tokens pass on what they received (adding each dropped value to the
    next *kept* tokens instead would multiply their norms).

    Cost: the attention that each position received (another attention pass, unless the scorer
    computes it), and O(N (merge + 1) d) for the values of a head.

    Attributes:
        merge: number of tokens that share a dropped value (CaM's 32).
        seed: random seed. Each layer draws its uniforms [G, N] from (seed, layer), so they do not
            depend on the budget or on the order of layers.
    """

    represents = "mixture"
    removed_fields = (("denominator", "mean_next"),)

    merge: int = bounded(32, at_least=1, hint="CaM's is 32; for no merging use the packer 'evict'.")
    seed: int = bounded(0, at_least=0)

    def needs(self) -> Needs:
        return Needs.observed(ReceivedAttention())

    def layer(self, given: LayerToPack) -> RaggedEntries:
        """The layer's entries [E, d].

        Raises `MissingCaptureError` if the attention that tokens received was not captured.
        """
        capture = given.capture
        packed, spans = best_tokens(given), capture.spans
        entry, (head, at), is_kept = kept_in_context(given, packed)
        context = spans.region(0)
        received = ColumnSums().layer(capture, context, {})
        drawn = self.uniforms(len(is_kept), context.length, capture.number).to(is_kept.device)
        share = self.shares(received, ~is_kept, drawn)
        after = replayed(capture.values[:, context.start : context.end].float(), share, self.merge)
        values = packed.values.clone()
        flows = reached(share, self.merge)[head, at][:, None]
        values[entry] = torch.where(flows, rounded(after[head, at], values.dtype), values[entry])
        return dataclasses.replace(packed, values=values)

    def uniforms(self, heads: int, length: int, layer: int) -> Tensor:
        """[G, N] float64 in [0, 1) on the CPU, the same for every budget and device."""
        return torch.from_numpy(np.random.default_rng([self.seed, layer]).random((heads, length)))

    def shares(self, received: Tensor, dropped: Tensor, uniforms: Tensor) -> Tensor:
        """M_t / m_t for dropped tokens, 0 for kept ones: float32 [G, N].

        Args:
            received: A [G, N].
            dropped: bool [G, N].
            uniforms: [G, N] in [0, 1); M_t = 1 where it is below p_t.
        """
        count = self._following(received)
        merges = dropped & (uniforms < self.probabilities(received)) & (count > 0)
        return torch.where(merges, 1.0 / count.clamp(min=1).float(), 0.0)

    def probabilities(self, received: Tensor) -> Tensor:
        """p, float64 [G, N], from A [G, N].

        If the denominator is 0, as for the last token, p is 1 if A_t > 0, else 0.
        """
        attention = received.double()
        total = functional.pad(running_sums(attention), (1, 0))
        count = self._following(received)
        first = torch.arange(1, attention.shape[1] + 1, device=attention.device)
        window = total[:, first + count] - total[:, first]
        # A difference of running sums can be off from 0 by rounding.
        other = window.clamp(min=0) / count.clamp(min=1)
        certain = torch.where(attention > 0, 1.0, 0.0).double()
        return torch.where(other > 0, (attention / other).clamp(0, 1), certain)

    def _following(self, received: Tensor) -> Tensor:
        """int64 [N]: m_t."""
        left = torch.arange(received.shape[1] - 1, -1, -1, device=received.device)
        return left.clamp(max=self.merge)


def replayed(values: Tensor, share: Tensor, reach: int, *, block: int = _BLOCK) -> Tensor:
    """Every token's value after all additions from tokens before it: float32 [G, N, d].

        out_s = values_s + sum_{s - reach <= t < s} share_t out_t

    This is a unit lower triangular system with a band of `reach`. It is solved in blocks of tokens:
    each block needs the additions from the `reach` tokens before it, and one small triangle.

    Args:
        values: float32 [G, N, d].
        share: float32 [G, N].
        reach: m.
        block: tokens per block; affects only speed.
    """
    out = values.clone()
    place = torch.arange(values.shape[1], device=values.device)

    def band(rows: slice, sources: slice) -> Tensor:
        """[G, rows, sources]: the weight of each source in each row."""
        distance = place[rows, None] - place[sources]
        return share[:, None, sources] * ((distance > 0) & (distance <= reach))

    for first in range(0, values.shape[1], block):
        rows, earlier = slice(first, first + block), slice(max(0, first - reach), first)
        inflow = out[:, rows] + band(rows, earlier) @ out[:, earlier]
        lower = -band(rows, rows)
        out[:, rows] = torch.linalg.solve_triangular(lower, inflow, upper=False, unitriangular=True)
    return out


def reached(share: Tensor, reach: int) -> Tensor:
    """bool [G, N]: whether at least one of the `reach` tokens before a token is added to it."""
    total = functional.pad((share > 0).cumsum(dim=1), (1, 0))
    here = torch.arange(share.shape[1], device=share.device)
    return (total[:, here] - total[:, (here - reach).clamp(min=0)]) > 0
