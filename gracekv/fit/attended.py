"""Attention of the reference queries over all tokens of a layer, and over its kept entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.cache.base import RaggedLayer
from gracekv.fit.queries import QuerySet
from gracekv.prefill import Prefill, Region

# Bytes of logits that are held at once.
_CPU_BLOCK, _GPU_BLOCK = 32 * 2**20, 512 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """One layer: G KV heads, M = n*Q rows (query heads of a KV head times reference queries).

    The columns of a head are its packed entries and the last prompt token, which decoding feeds
    again; heads with fewer are padded to W columns.

    Attributes:
        columns: int64 [G, W] rows of the layer's packed tensors; of the last token and of padding
            any row.
        free: bool [G, W], entries of the compressible region, which may be changed.
        mass: float32 [G, M, W], exp(logit - the row's largest); multiplicities included, 0 in
            padded columns and where the query does not see the entry.
        total: float32 [G, M], the sum of exp(logit - the row's largest) over all visible tokens.
        values: float32 [G, W, d] of the entries and the last token.
        output: float32 [G, M, d], attention output over all visible tokens.
        weights: float32 [M] of the rows, of sum 1.
    """

    columns: Tensor
    free: Tensor
    mass: Tensor
    total: Tensor
    values: Tensor
    output: Tensor
    weights: Tensor

    def shares(self, multiplicity: Tensor | None = None) -> Tensor:
        """float32 [G, M, W]: attention over the kept entries; `multiplicity` [G, W] multiplies."""
        mass = self.mass if multiplicity is None else self.mass * multiplicity[:, None]
        return mass / mass.sum(dim=-1, keepdim=True).clamp_min(1e-30)


def attended(
    prefill: Prefill, layer: int, packed: RaggedLayer, region: Region, queries: QuerySet
) -> LayerAttention:
    """Meet the reference queries with all keys of `layer` and with its kept entries.

    Raises `MissingCaptureError` if a query was not captured.
    """
    keys, values = prefill.keys[layer].float(), prefill.values[layer].float()
    device, heads, length = keys.device, prefill.kv_heads, prefill.spans.length
    columns, positions, used = _columns(packed, length, device)
    entry_mass = packed.log_multiplicity[columns].exp().masked_fill_(~used, 0.0)
    # The last token is no packed entry, and counts once.
    entry_mass[torch.arange(heads), used.sum(1) - 1] = 1.0
    asked = queries.rotated(prefill, layer)
    sees = queries.asked_at.to(device).repeat(prefill.group)
    rows = asked.shape[1]
    mass = torch.empty(heads, rows, columns.shape[1], device=device)
    total = torch.empty(heads, rows, device=device)
    output = torch.empty(heads, rows, prefill.head_dim, device=device)
    limit = _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK
    block = max(1, limit // (4 * heads * length))
    place = torch.arange(length, device=device)
    packed_keys = packed.keys.float()[columns]
    packed_keys[torch.arange(heads), used.sum(1) - 1] = keys[:, -1]
    for first in range(0, rows, block):
        part = slice(first, first + block)
        hidden = place > sees[part, None]
        logits = (asked[:, part] @ keys.mT).masked_fill_(hidden, -torch.inf)
        top = logits.amax(dim=-1, keepdim=True)
        chance = logits.sub_(top).exp_()
        total[:, part] = chance.sum(dim=-1)
        output[:, part] = (chance @ values) / total[:, part, None]
        kept = (asked[:, part] @ packed_keys.mT).sub_(top)
        kept.masked_fill_(positions[:, None] > sees[part, None], -torch.inf)
        # A merged key can exceed every token's logit; beyond e^20 its mass says nothing more.
        mass[:, part] = kept.clamp_(max=20.0).exp_().mul_(entry_mass[:, None])
    own = packed.values.float()[columns]
    own[torch.arange(heads), used.sum(1) - 1] = values[:, -1]
    free = used & (positions >= region.start) & (positions < region.end)
    free[torch.arange(heads), used.sum(1) - 1] = False
    weights = queries.weights.to(device).repeat(prefill.group) / prefill.group
    return LayerAttention(columns, free, mass, total, own, output, weights)


def _columns(
    packed: RaggedLayer, length: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the packed tensors [G, W], positions [G, W], and which columns are used [G, W]."""
    counts = packed.lengths.to(device)
    width = int(counts.max()) + 1
    step = torch.arange(width, device=device)
    used = step <= counts[:, None]
    first = packed.offsets[:-1].to(device)[:, None]
    columns = (first + step).clamp_(max=max(0, packed.entries - 1))
    positions = packed.positions.long()[columns]
    positions[torch.arange(len(counts)), counts] = length - 1
    return columns, positions, used


def scattered(packed: Tensor, attention: LayerAttention, changed: Tensor) -> Tensor:
    """`packed` [E, ...] with `changed` [G, W, ...] in the free columns, in packed's dtype."""
    result = packed.clone()
    result[attention.columns[attention.free]] = changed[attention.free].to(packed.dtype)
    return result
