"""Fitted values and multiplicities in float64, head by head, by least squares."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.fit.queries import QuerySet
from gracekv.fit.values_and_mass import LEAST, MOST
from gracekv.kernels.logits import capped
from gracekv.prefill import Prefill, Region


def fitted_head(
    prefill: Prefill,
    layer: int,
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
    keys, values = (x[layer][head].double() for x in (prefill.keys, prefill.values))
    own_keys, own_values, positions, log_m = packed.head(head)
    own_keys, own_values, log_m = own_keys.double(), own_values.double(), log_m.double()
    free = (positions >= region.start) & (positions < region.end)
    outputs: list[Tensor] = []
    attended: list[Tensor] = []
    weights: list[float] = []
    on_tokens: list[Tensor] = []
    on_sink: list[Tensor] = []
    for number in range(prefill.group):
        for q, (at, asked) in enumerate(
            zip(queries.positions.tolist(), queries.asked_at.tolist(), strict=True)
        ):
            query = prefill.queries_at(layer, [at])[head * prefill.group + number].double()
            rope = prefill.rope_of(layer)
            plain_query = rope.unrotate(query, torch.tensor([at]))
            query = rope.rotate(plain_query, torch.tensor([asked]))[0]
            sink = torch.zeros(()).double()
            if prefill.sink_logits:
                sink = prefill.sink_logits[layer][head * prefill.group + number].double().exp()
            logits, own_logits = (
                capped(prefill.scale * x @ query, prefill.softcap)
                for x in (keys[: asked + 1], own_keys)
            )
            full = torch.exp(logits)
            kept = torch.exp(own_logits + log_m) * (positions <= asked)
            total = full.sum() + sink
            on_tokens.append(full.sum() / total)
            on_sink.append(sink / total)
            again = full[-1] if asked == prefill.spans.length - 1 else torch.zeros(()).double()
            attended.append(torch.cat([kept, again[None]]) / total)
            outputs.append((full @ values[: asked + 1]) / total)
            weights.append(float(queries.weights[q]) / prefill.group)
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
