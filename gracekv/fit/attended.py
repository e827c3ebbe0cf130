"""Attention of the reference queries over all tokens of a layer, and over its kept entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.fit.queries import QuerySet
from gracekv.kernels.linalg import batched_linear
from gracekv.kernels.logits import capped
from gracekv.prefill import Prefill, Region

# Bytes of logits that are held at once.
_CPU_BLOCK, _GPU_BLOCK = 8 * 2**20, 512 * 2**20
# Columns come in multiples of this: oneDNN compiles and keeps a product for each of its shapes.
_COLUMNS = 128


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
        total: float32 [G, M], the sum of exp(logit - the row's largest) over all visible tokens,
            and the sink.
        sink: float32 [G, M], exp(sink logit - the row's largest); 0 where the model has none.
        values: float32 [G, W, d] of the entries and the last token.
        output: float32 [G, M, d], attention output over all visible tokens.
        weights: float32 [M] of the rows, of sum 1.
    """

    columns: Tensor
    free: Tensor
    mass: Tensor
    total: Tensor
    sink: Tensor
    values: Tensor
    output: Tensor
    weights: Tensor

    def shares(self, multiplicity: Tensor | None = None) -> Tensor:
        """float32 [G, M, W]: attention over the kept entries; `multiplicity` [G, W] multiplies."""
        mass = self.mass.clone() if multiplicity is None else self.mass * multiplicity[:, None]
        return mass.div_((mass.sum(dim=-1, keepdim=True) + self.sink[..., None]).clamp_min(1e-30))


def attended(
    prefill: Prefill, layer: int, packed: RaggedEntries, region: Region, queries: QuerySet
) -> LayerAttention:
    """Meet the reference queries with all keys of `layer` and with its kept entries.

    Raises `MissingCaptureError` if a query was not captured.
    """
    keys, values = prefill.keys[layer].float(), prefill.values[layer].float()
    device, heads, length = keys.device, prefill.kv_heads, prefill.spans.length
    columns, positions, used = _columns(packed, length, device)
    last = torch.arange(heads, device=device), used.sum(1) - 1
    entry_mass = packed.log_multiplicity[columns].exp().masked_fill_(~used, 0.0)
    # The last token is no packed entry, and counts once.
    entry_mass[last] = 1.0
    packed_keys = _with_last(packed.keys, columns, last, keys)
    own = _with_last(packed.values, columns, last, values)
    exact = packed_keys[used].equal(_rows_of(keys, positions)[used])
    asked = queries.rotated(prefill, layer)
    sees = queries.asked_at.to(device).repeat(prefill.group)
    rows = asked.shape[1]
    mass = torch.empty(heads, rows, columns.shape[1], device=device)
    total = torch.empty(heads, rows, device=device)
    output = torch.empty(heads, rows, prefill.head_dim, device=device)
    sink, sinks = torch.zeros_like(total), None
    if prefill.sink_logits:
        # One of each query head, and rows are those of a KV head's query heads, head after head.
        own_sinks = prefill.sink_logits[layer].to(device).view(heads, -1)
        sinks = own_sinks.repeat_interleave(rows // prefill.group, dim=1)
    limit = _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK
    block = max(1, limit // (4 * heads * length))
    place = torch.arange(length, device=device)
    across = values.mT.contiguous()
    for first in range(0, rows, block):
        part = slice(first, first + block)
        # Only rows that are asked before the end have keys that they do not see.
        early = (sees[part] < length - 1).nonzero()[:, 0]
        seen = sees[part][early, None]
        logits = capped(batched_linear(asked[:, part], keys), prefill.softcap)
        logits[:, early] = logits[:, early].masked_fill_(place > seen, -torch.inf)
        top = logits.amax(dim=-1, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks[:, part, None])
            sink[:, part] = (sinks[:, part] - top[..., 0]).exp()
        chance = logits.sub_(top).exp_()
        total[:, part] = chance.sum(dim=-1) + sink[:, part]
        output[:, part] = batched_linear(chance, across) / total[:, part, None]
        if exact:
            kept = chance.gather(2, positions[:, None].expand(-1, chance.shape[1], -1))
        else:
            kept = capped(batched_linear(asked[:, part], packed_keys), prefill.softcap).sub_(top)
            kept[:, early] = kept[:, early].masked_fill_(positions[:, None] > seen, -torch.inf)
            # A merged key can exceed every token's logit; beyond e^20 its mass says nothing more.
            kept.clamp_(max=20.0).exp_()
        mass[:, part] = kept.mul_(entry_mass[:, None])
    free = used & (positions >= region.start) & (positions < region.end)
    free[last] = False
    weights = queries.weights.to(device).repeat(prefill.group) / prefill.group
    return LayerAttention(columns, free, mass, total, sink, own, output, weights)


def _rows_of(tokens: Tensor, positions: Tensor) -> Tensor:
    """[G, W, d] of `tokens` [G, T, d] at `positions` [G, W]."""
    return tokens.gather(1, positions[..., None].expand(-1, -1, tokens.shape[2]))


def _with_last(
    packed: Tensor, columns: Tensor, last: tuple[Tensor, Tensor], tokens: Tensor
) -> Tensor:
    """float32 [G, W, d]: `packed` [E, d] by columns, and the last token of `tokens` [G, T, d]."""
    wide = packed.float()[columns]
    wide[last] = tokens[:, -1]
    return wide


def _columns(
    packed: RaggedEntries, length: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the packed tensors [G, W], positions [G, W], and which columns are used [G, W]."""
    counts = packed.lengths.to(device)
    width = -(-(int(counts.max()) + 1) // _COLUMNS) * _COLUMNS
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
