"""Fitted values and multiplicities in float64, head by head, by least squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.fit.base import QuerySet
from gracekv.fit.values_and_mass import LEAST, MOST
from gracekv.kernels.linalg import capped
from gracekv.prefill import LayerCapture, Region


def fitted_head(
    capture: LayerCapture, head: int, packed: RaggedEntries, region: Region, queries: QuerySet,
    trust: float, trust_read: float, mass_trust: float | None = None, scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Values [E_g, d] and log multiplicities [E_g] of one KV head, float64.

    Multiplicities are fitted if `mass_trust` is a number. `scores` [G, N] of the region's tokens
    are those of `by_score`. Source: ours, `gracekv.fit.values`.
    """
    own_values, log_m = (x.double() for x in packed.head(head)[1::2])
    attn = _attention(capture, head, packed, queries)
    weight = queries.weights.double().repeat(capture.group) / capture.group
    positions = packed.head(head)[2]
    columns = ((positions >= region.start) & (positions < region.end)).nonzero()[:, 0]
    factor, change = torch.ones_like(log_m), torch.zeros_like(own_values)
    own = None if scores is None else scores[head, positions[columns].long() - region.start]
    if len(columns):
        plain = attn.kept[:, columns]
        if mass_trust is not None:
            missing = 1 - attn.sink - attn.kept.sum(dim=1, keepdim=True)
            gain = _least_squares(plain, missing, weight, mass_trust, trust_read, own)
            factor[columns] = (1 + gain[:, 0]).clamp(LEAST, MOST)
        shares = attn.shares(factor)
        error = attn.targets - shares @ torch.cat([own_values, capture.values[head, -1:].double()])
        change[columns] = _least_squares(shares[:, columns], error, weight, trust, trust_read, own)
    return own_values + change, log_m + factor.log()


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Attention of M query rows of a head, as shares of their attention over all tokens.

    Attributes:
        kept: float64 [M, E + 1], attention to the kept entries and the last prompt token.
        sink: float64 [M, 1].
        targets: float64 [M, d], attention output over all tokens.
    """

    kept: Tensor
    sink: Tensor
    targets: Tensor

    def shares(self, factor: Tensor) -> Tensor:
        """float64 [M, E + 1]: attention over kept entries, multiplicities times `factor` [E]."""
        rows = self.kept * torch.cat([factor, factor.new_ones(1)])
        return rows / (rows.sum(dim=1, keepdim=True) + self.sink)


def _attention(capture: LayerCapture, head: int, packed: RaggedEntries, queries: QuerySet) -> _Seen:
    keys, values = (x[head].double() for x in (capture.keys, capture.values))
    own_keys, _, positions, log_m = packed.head(head)
    shares, sinks, targets = [], [], []
    for number in range(capture.group):
        for q, at in enumerate(queries.asked_at.tolist()):
            query = _query(capture, head * capture.group + number, q, queries)
            sink = keys.new_zeros(1)
            if capture.sinks is not None:
                sink = capture.sinks[head * capture.group + number].double().exp()[None]
            both = keys[: at + 1], own_keys.double()
            logits, own_logits = (capped(capture.scale * x @ query, capture.softcap) for x in both)
            full = torch.exp(logits)
            masses = torch.exp(own_logits + log_m.double()) * (positions <= at)
            total = full.sum() + sink
            last = full[-1:] * float(at == capture.spans.length - 1)
            shares.append(torch.cat([masses, last]) / total)
            sinks.append(sink / total)
            targets.append((full @ values[: at + 1]) / total)
    return _Seen(*(torch.stack(x) for x in (shares, sinks, targets)))


def _query(capture: LayerCapture, head: int, q: int, queries: QuerySet) -> Tensor:
    """Reference query `q` of a query head, [d], rotated to the position it is asked from."""
    again = q - len(queries.positions)
    if queries.repeated is not None and 0 <= again < queries.repeated.shape[1]:
        return queries.repeated[head, again].double()
    back, rope = len(queries.asked_at) - q, capture.rope
    at = torch.tensor([queries.tail.end - back])
    if back > queries.tail.length:
        at = queries.positions[q : q + 1]
    plain = rope.unrotate(capture.queries_at(at)[head].double(), at)
    return rope.rotate(plain, queries.asked_at[q : q + 1])[0]


def matched_head(
    keys: Tensor, values: Tensor, query: Tensor, kept: Tensor, least: float, most: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Values [E, d] and multiplicities [E] of `least_squares`, float64.

    Args:
        keys: [N, d], of the compressible tokens.
        values: [N, d].
        query: [M, d], reference queries times the scale.
        kept: int64 [E], which tokens stayed.
        least: bounds of the multiplicities.
        most: like `least`.
        steps: projected gradient steps.

    Source: Zweiger et al. (2026), Attention Matching, arXiv:2602.16284, and its code.
    """
    logits = query.double() @ keys.double().T
    mass = torch.exp(logits - logits.amax(dim=1, keepdim=True))
    design, total = mass[:, kept], mass.sum(dim=1)
    masses = torch.linalg.lstsq(design, total[:, None], driver="gels").solution[:, 0]
    masses = masses.clamp(least, most)
    along = torch.ones_like(masses)
    for _ in range(3):
        along = design.T @ (design @ along)
        along = along / along.norm()
    for _ in range(steps):
        slope = design.T @ (design @ masses - total)
        masses = (masses - slope / (design @ along).square().sum()).clamp(least, most)
    shares = design * masses
    shares = shares / shares.sum(dim=1, keepdim=True)
    target = mass @ values.double() / total[:, None]
    return torch.linalg.lstsq(shares, target, driver="gels").solution, masses


def _least_squares(
    a: Tensor, b: Tensor, weight: Tensor, trust: float, trust_read: float, scores: Tensor | None
) -> Tensor:
    """The ridge problem as ordinary least squares with one more row per unknown."""
    power = (weight[:, None] * a.square()).sum(dim=0)
    mean = power.mean()
    if scores is not None:
        power = mean * scores.double().square() / scores.double().square().mean()
    penalty = (trust * mean + trust_read * power if mean > 0 else torch.ones_like(power)).sqrt()
    root = weight.sqrt()[:, None]
    top = torch.cat([a * root, penalty.diag()])
    right = torch.cat([b * root, b.new_zeros(a.shape[1], b.shape[1])])
    solution: Tensor = torch.linalg.lstsq(top, right).solution
    return solution
