"""What reference queries get from all tokens of a layer, and from the entries that were kept.

The first is noted while the layer is whole, a few numbers a query; the second needs no dropped
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.fit.queries import QuerySet
from gracekv.kernels.linalg import batched_linear, linear
from gracekv.kernels.logits import capped
from gracekv.prefill import LayerCapture, Region

# Bytes of logits that are held at once.
_CPU_BLOCK, _GPU_BLOCK = 8 * 2**20, 512 * 2**20
# Columns come in multiples of this: oneDNN compiles and keeps a product for each of its shapes.
_COLUMNS = 128


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """One layer's reference queries, and what they get from all tokens that they see.

    G KV heads, M = n*Q rows (query heads of a KV head times reference queries).

    Attributes:
        asked: float32 [G, M, d], the queries at the positions they are asked from, times the
            attention scale.
        sees: int64 [M], the last position that each row sees.
        top: float32 [G, M], the largest logit, the sink's included.
        total: float32 [G, M], the sum of exp(logit - top) over all visible tokens, and the sink.
        sink: float32 [G, M], exp(sink logit - top); 0 where the model has none.
        output: float32 [G, M, d], attention output.
        weights: float32 [M] of the rows, of sum 1.
        last: float32 [2, G, d], key and value of the last prompt token, which decoding feeds again.
        length: T, prompt tokens.
        softcap: of the logits; None: none.
    """

    asked: Tensor
    sees: Tensor
    top: Tensor
    total: Tensor
    sink: Tensor
    output: Tensor
    weights: Tensor
    last: Tensor
    length: int
    softcap: float | None

    @classmethod
    def of(cls, capture: LayerCapture, queries: QuerySet) -> Self:
        """Meet the queries with the keys of `layer` that count for them.

        Raises `MissingCaptureError` if a query was not captured.
        """
        keys, values = capture.keys.float(), capture.values.float()
        device, heads, length = keys.device, capture.kv_heads, capture.spans.length
        asked = queries.rotated(capture)
        sees = queries.asked_at.to(device).repeat(capture.group)
        rows = asked.shape[1]
        top, total = (torch.empty(heads, rows, device=device) for _ in range(2))
        output = torch.empty(heads, rows, capture.head_dim, device=device)
        sink, sinks = torch.zeros_like(total), None
        if capture.sinks is not None and queries.within is None:
            # One of each query head, and rows are those of a KV head's query heads in turn.
            own_sinks = capture.sinks.to(device).view(heads, -1)
            sinks = own_sinks.repeat_interleave(rows // capture.group, dim=1)
        limit = _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK
        block = max(1, limit // (4 * length))
        inside = queries.within or Region(0, length)
        place = torch.arange(inside.start, inside.end, device=device)
        # Head by head, since products want a copy of the values the other way round.
        for g, own in enumerate(values):
            across = own[inside.start : inside.end].T.contiguous()
            own_keys = keys[g, inside.start : inside.end]
            for first in range(0, rows, block):
                part = slice(first, first + block)
                # Only rows that are asked before the end have keys that they do not see.
                early = (sees[part] < length - 1).nonzero()[:, 0]
                logits = capped(linear(asked[g, part], own_keys), capture.softcap)
                hidden = place > sees[part][early, None]
                logits[early] = logits[early].masked_fill_(hidden, -torch.inf)
                top[g, part] = logits.amax(dim=-1)
                if sinks is not None:
                    top[g, part] = torch.maximum(top[g, part], sinks[g, part])
                    sink[g, part] = (sinks[g, part] - top[g, part]).exp()
                chance = logits.sub_(top[g, part, None]).exp_()
                total[g, part] = chance.sum(dim=-1) + sink[g, part]
                output[g, part] = linear(chance, across) / total[g, part, None]
        weights = queries.weights.to(device).repeat(capture.group) / capture.group
        last = torch.stack([keys[:, -1], values[:, -1]])
        sizes = (length, capture.softcap)
        return cls(asked, sees, top, total, sink, output, weights, last, *sizes)


@dataclass(frozen=True, slots=True, eq=False)
class KeptMass:
    """Unnormalised attention of reference queries over the kept entries of one layer.

    A head has W columns; those that hold no entry have no mass.

    Attributes:
        free: bool [G, W], entries that may be changed.
        mass: float32 [G, M, W], exp(logit - top); multiplicities included, 0 in columns without an
            entry and where the query does not see it.
        total: float32 [G, M], as in `Reference`.
        sink: float32 [G, M], as there.
        weights: float32 [M], as there.
    """

    free: Tensor
    mass: Tensor
    total: Tensor
    sink: Tensor
    weights: Tensor

    def shares(self, multiplicity: Tensor | None = None) -> Tensor:
        """float32 [G, M, W]: attention over the kept entries; `multiplicity` [G, W] multiplies."""
        mass = self.mass.clone() if multiplicity is None else self.mass * multiplicity[:, None]
        return mass.div_((mass.sum(dim=-1, keepdim=True) + self.sink[..., None]).clamp_min(1e-30))


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention(KeptMass):
    """The same where the entries are packed, with their values and what the queries had.

    The columns of a head are its packed entries and the last prompt token; heads with fewer are
    padded to W columns. Free are entries of the compressible region.

    Attributes:
        columns: int64 [G, W] rows of the layer's packed tensors; of the last token and of padding
            any row.
        values: float32 [G, W, d] of the entries and the last token.
        output: float32 [G, M, d], as in `Reference`.
    """

    columns: Tensor
    values: Tensor
    output: Tensor


def attended(reference: Reference, packed: RaggedEntries, region: Region) -> LayerAttention:
    """Meet the reference queries with the kept entries of their layer."""
    device = reference.asked.device
    columns, positions, used = _columns(packed, reference.length, device)
    last = torch.arange(len(columns), device=device), used.sum(1) - 1
    keys, values = packed.keys.float()[columns], packed.values.float()[columns]
    keys[last], values[last] = reference.last
    entry_mass = packed.log_multiplicity[columns].exp().masked_fill_(~used, 0.0)
    # The last token is no packed entry, and counts once.
    entry_mass[last] = 1.0
    mass = capped(batched_linear(reference.asked, keys), reference.softcap)
    mass.sub_(reference.top[..., None])
    early = (reference.sees < reference.length - 1).nonzero()[:, 0]
    unseen = positions[:, None] > reference.sees[early, None]
    mass[:, early] = mass[:, early].masked_fill_(unseen, -torch.inf)
    # A merged key can exceed every token's logit; beyond e^20 its mass says nothing more.
    mass.clamp_(max=20.0).exp_().mul_(entry_mass[:, None])
    free = used & (positions >= region.start) & (positions < region.end)
    free[last] = False
    kept = (free, mass, reference.total, reference.sink, reference.weights)
    return LayerAttention(*kept, columns, values, reference.output)


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
