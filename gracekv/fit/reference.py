"""Fitted values and multiplicities in float64, head by head, by least squares."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.fit.queries import QuerySet
from gracekv.fit.values_and_mass import LEAST, MOST
from gracekv.kernels.logits import capped
from gracekv.prefill import LayerCapture, Region


def fitted_head(
    capture: LayerCapture,
    head: int,
    packed: RaggedEntries,
    region: Region,
    queries: QuerySet,
    trust: float,
    trust_read: float,
    mass_trust: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Values [E_g, d] and log multiplicities [E_g] of one KV head, float64.

    Multiplicities are fitted if `mass_trust` is a number. Source: ours, `gracekv.fit.values`.
    """
    keys, values = (x[head].double() for x in (capture.keys, capture.values))
    own_keys, own_values, positions, log_m = packed.head(head)
    own_keys, own_values, log_m = own_keys.double(), own_values.double(), log_m.double()
    free = (positions >= region.start) & (positions < region.end)
    outputs: list[Tensor] = []
    attended: list[Tensor] = []
    weights: list[float] = []
    on_tokens: list[Tensor] = []
    on_sink: list[Tensor] = []
    for number in range(capture.group):
        for q, asked in enumerate(queries.asked_at.tolist()):
            query = _query(capture, head * capture.group + number, q, queries)
            sink = torch.zeros(()).double()
            if capture.sinks is not None:
                sink = capture.sinks[head * capture.group + number].double().exp()
            logits, own_logits = (
                capped(capture.scale * x @ query, capture.softcap)
                for x in (keys[: asked + 1], own_keys)
            )
            full = torch.exp(logits)
            kept = torch.exp(own_logits + log_m) * (positions <= asked)
            total = full.sum() + sink
            on_tokens.append(full.sum() / total)
            on_sink.append(sink / total)
            again = full[-1] if asked == capture.spans.length - 1 else torch.zeros(()).double()
            attended.append(torch.cat([kept, again[None]]) / total)
            outputs.append((full @ values[: asked + 1]) / total)
            weights.append(float(queries.weights[q]) / capture.group)
    plain, targets = torch.stack(attended), torch.stack(outputs)
    missing = torch.stack(on_tokens)[:, None] - plain.sum(dim=1, keepdim=True)
    weight = torch.tensor(weights, dtype=torch.float64)
    everything = torch.cat([own_values, values[-1:]])
    columns = free.nonzero()[:, 0]
    factor = torch.ones(len(plain.T), dtype=torch.float64)
    if mass_trust is not None and len(columns):
        change = _least_squares(plain[:, columns], missing, weight, mass_trust, trust_read)
        factor[columns] = (1 + change[:, 0]).clamp(LEAST, MOST)
    rows = plain * factor
    rows = rows / (rows.sum(dim=1, keepdim=True) + torch.stack(on_sink)[:, None])
    result = own_values.clone()
    if len(columns):
        error = targets - rows @ everything
        result[columns] += _least_squares(rows[:, columns], error, weight, trust, trust_read)
    return result, log_m + factor[:-1].log()


def _query(capture: LayerCapture, head: int, q: int, queries: QuerySet) -> Tensor:
    """Reference query `q` of a query head, [d], rotated to where it is asked from."""
    first = len(queries.asked_at) - len(queries.positions)
    if queries.repeated is not None and q < first:
        return queries.repeated[head, q].double()
    at, rope = queries.positions[q - first : q - first + 1], capture.rope
    plain = rope.unrotate(capture.queries_at(at)[head].double(), at)
    return rope.rotate(plain, queries.asked_at[q : q + 1])[0]


def matched_head(
    keys: Tensor,
    values: Tensor,
    asked: Tensor,
    kept: Tensor,
    least: float,
    most: float,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Values [E, d] and multiplicities [E] of `least_squares`, float64.

    Args:
        keys: [N, d], of the compressible tokens.
        values: [N, d].
        asked: [M, d], reference queries times the scale.
        kept: int64 [E], which tokens stayed.
        least: bounds of the multiplicities.
        most: as `least`.
        steps: projected gradient steps.

    Source: Zweiger et al. (2026), Attention Matching, arXiv:2602.16284, and its code.
    """
    logits = asked.double() @ keys.double().T
    mass = torch.exp(logits - logits.amax(dim=1, keepdim=True))
    design, total = mass[:, kept], mass.sum(dim=1)
    found = (
        torch.linalg.lstsq(design, total[:, None], driver="gels").solution[:, 0].clamp(least, most)
    )
    along = torch.ones_like(found)
    for _ in range(3):
        along = design.T @ (design @ along)
        along = along / along.norm()
    for _ in range(steps):
        slope = design.T @ (design @ found - total)
        found = (found - slope / (design @ along).square().sum()).clamp(least, most)
    shares = design * found
    shares = shares / shares.sum(dim=1, keepdim=True)
    target = mass @ values.double() / total[:, None]
    return torch.linalg.lstsq(shares, target, driver="gels").solution, found


def _least_squares(a: Tensor, b: Tensor, weight: Tensor, trust: float, trust_read: float) -> Tensor:
    """The ridge problem as ordinary least squares with a row for each unknown."""
    read = (weight[:, None] * a.square()).sum(dim=0)
    mean = read.mean()
    penalty = (trust * mean + trust_read * read if mean > 0 else torch.ones_like(read)).sqrt()
    root = weight.sqrt()[:, None]
    top = torch.cat([a * root, penalty.diag()])
    right = torch.cat([b * root, b.new_zeros(a.shape[1], b.shape[1])])
    solution: Tensor = torch.linalg.lstsq(top, right).solution
    return solution
