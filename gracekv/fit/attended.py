"""Attention of reference queries over all tokens of a layer, and over its kept entries.

The first is recorded while the layer is complete, as a few numbers per query; the second does not
need the dropped tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.fit.base import QuerySet
from gracekv.kernels.linalg import batched_linear, capped, rounded, transposed
from gracekv.kernels.uploads import filled, on_device, upload
from gracekv.prefill import LayerCapture, Region
from gracekv.prefill.spans import first_entries

# Maximum bytes of logits held at once.
_CPU_BLOCK, _GPU_BLOCK = 8 * 2**20, 512 * 2**20
# Numbers of columns are multiples of this, since oneDNN compiles and caches a product per shape.
_COLUMNS = 128


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The reference queries of a layer, and their attention over all tokens that they see.

    There are G KV heads and M = n*Q rows: query heads of a KV head times reference queries.

    Attributes:
        asked: float32 [G, M, d], the queries, rotated to the positions they are asked from, times
            the attention scale.
        sees: int64 [B], the last position visible to each of the last B queries of a query head;
            the others see all tokens.
        top: float32 [G, M], the largest logit, including the sink's.
        total: float32 [G, M], the sum of exp(logit - top) over all visible tokens and the sink.
        sink: float32 [G, M], exp(sink logit - top), 0 if the model has none, plus the mass of the
            entries before the sequence.
        before: float32 [G, M, d], attention output over these and the sink; undefined if there are
            none.
        output: float32 [G, M, d], attention output.
        weights: float32 [G, M], weights of the rows, of sum 1 in each head.
        last: [G, 2, d], key and value of the last prompt token, which decoding feeds again.
        length: T, prompt tokens.
        group: n.
        softcap: logit softcap, or None.
        scores: float32 [G, N], scores of the region's tokens, if the fit asks for them.
    """

    asked: Tensor
    sees: Tensor
    top: Tensor
    total: Tensor
    sink: Tensor
    before: Tensor
    output: Tensor
    weights: Tensor
    last: Tensor
    length: int
    group: int
    softcap: float | None
    scores: Tensor | None = None

    @classmethod
    def of(cls, capture: LayerCapture, queries: QuerySet) -> Self:
        """The attention of `queries` over the keys of a layer (`queries.within`, or all).

        Raises `MissingCaptureError` if a query was not captured.
        """
        keys, values = capture.keys, capture.values
        device, heads, length = keys.device, capture.kv_heads, capture.spans.length
        query = queries.rotated(capture)
        rows, output = query.shape[1], torch.empty_like(query)
        top, total = torch.empty_like(query[..., 0]), torch.empty_like(query[..., 0])
        sink, sinks = filled(1, 0.0, torch.float32, device).expand(total.shape), None
        if capture.sinks is not None and queries.within is None:
            # One sink per query head; rows are grouped by query head.
            own_sinks = capture.sinks.to(device).view(heads, -1)
            sinks = own_sinks.repeat_interleave(rows // capture.group, dim=1)
        inside = queries.within or Region(0, length)
        # All queries see the keys before the first of these positions.
        at = queries.asked_at.numpy()
        all_see = int(at.min(initial=length)) + 1
        place = np.arange(max(inside.start, all_see), max(inside.end, all_see))
        unseen = on_device(torch.from_numpy(place > np.tile(at, capture.group)[:, None]), device)
        past = max(0, capture.spans.past - inside.start)
        before = output
        if past or sinks is not None:
            sink, before = torch.zeros_like(total), torch.zeros_like(query)
        plain = device.type != "cpu" and length >= 2048 and before is output and not queries.within
        # Head by head on the CPU, since products need a transposed copy of the values.
        limit, at_once = (_CPU_BLOCK, 1) if device.type == "cpu" else (_GPU_BLOCK, heads)
        block = max(1, limit // (4 * length * at_once))
        for head in range(0, heads, at_once):
            head_slice = slice(head, head + at_once)
            if plain:
                every = query, unseen.expand(heads, -1, -1), top, total, output
                for row in range(0, rows, block):
                    in_parts(capture, *(x[:, row : row + block] for x in every))
                continue
            states = [x[head_slice, inside.start : inside.end].float() for x in (keys, values)]
            # No query sees a head's padding, which comes first among its places.
            padding = first_entries(states[0], past)[0] if at_once == 1 else 0
            states, past_end = [x[:, padding:] for x in states], past - padding
            across = transposed(states[1])
            for row in range(0, rows, block):
                part = head_slice, slice(row, row + block)
                logits = capped(batched_linear(query[part], states[0], past > 0), capture.softcap)
                if len(place):
                    logits[..., -len(place) :].masked_fill_(unseen[part[1]], -torch.inf)
                torch.amax(logits, dim=-1, out=top[part])
                if queries.within is not None:
                    # A query before the first of these keys sees none: zero mass and output.
                    top[part] = top[part].clamp_min(torch.finfo(torch.float32).min)
                if sinks is not None:
                    top[part] = torch.maximum(top[part], sinks[part])
                    sink[part] = (sinks[part] - top[part]).exp()
                chance = logits.sub_(top[part][..., None]).exp_()
                torch.sum(chance, dim=-1, out=total[part])
                if sinks is not None:
                    total[part] += sink[part]
                product = batched_linear(chance[..., past_end:], across[..., past_end:], past > 0)
                if past:
                    past_mass = chance[..., :past_end]
                    sink[part] += past_mass.sum(dim=-1)
                    past_sum = batched_linear(past_mass, across[..., :past_end], past > 0)
                    torch.div(past_sum, sink[part][..., None].clamp_min(1e-30), out=before[part])
                    product += past_sum
                # If a key is seen, the largest logit contributes 1.
                torch.div(product, total[part][..., None].clamp_min(1e-30), out=output[part])
        weights = (queries.weights.expand(capture.group, -1) / capture.group).flatten()
        weights = on_device(weights, device).expand(heads, -1)
        last = torch.stack([keys[:, -1], values[:, -1]], dim=1)
        blind = on_device(queries.asked_at[(at == length - 1).cumprod().sum() :], device)
        sizes = (length, capture.group, capture.softcap)
        return cls(query, blind, top, total, sink, before, output, weights, last, *sizes)

    @classmethod
    def stack(cls, layers: Sequence[Self]) -> Self:
        """One reference with the heads of several layers whose queries see the same positions."""
        if len(layers) == 1:
            return layers[0]
        names = layers[0]._by_head()
        joined: dict[str, Any] = {x: torch.cat([getattr(y, x) for y in layers]) for x in names}
        return replace(layers[0], **joined)

    def heads(self) -> list[Self]:
        """One reference per head; tensors are views."""
        parts = {name: x.split(1) for name, x in self._by_head().items()}
        each = zip(*parts.values(), strict=True)
        return [replace(self, **dict(zip(parts, own, strict=True))) for own in each]

    def _by_head(self) -> dict[str, Any]:
        """The tensors with one row per head."""
        names = (field.name for field in fields(self) if field.name != "sees")
        return {x: own for x in names if isinstance(own := getattr(self, x), Tensor)}


def in_parts(
    capture: LayerCapture, query: Tensor, unseen: Tensor, top: Tensor, total: Tensor, output: Tensor
) -> None:
    """Write top and total [G, M] and output [G, M, d] of a `Reference` without sinks, on a GPU.

    Few rows use few multiprocessors, so the keys are cut into parts, each with its own softmax.
    `query` is [G, M, d] as in `Reference`; `unseen` is bool [G, M, C]: which of the last C keys are
    not seen.
    """
    (heads, length, dim), states = capture.keys.shape, [capture.keys, capture.values]
    parts = max(1, min(16, length // max(1024, unseen.shape[2] + 1)))
    if more := -length % (8 * parts):
        # Keys that no query sees pad the parts to equal, aligned lengths.
        states = [torch.cat([x[:, :more], x], dim=1) for x in states]
    keys, values = (x.float().reshape(heads * parts, -1, dim) for x in states)
    repeated = query[:, None].expand(-1, parts, -1, -1).flatten(0, 1)
    shares = capped(batched_linear(repeated, keys), capture.softcap)
    shares[::parts, :, :more] = -torch.inf
    blind = shares[parts - 1 :: parts, :, shares.shape[2] - unseen.shape[2] :]
    blind.masked_fill_(unseen, -torch.inf)
    tops = shares.amax(dim=-1)
    torch.softmax(shares, dim=-1, out=shares)
    # The largest share is exp(0) divided by the part's sum.
    by_part = tops, shares.amax(dim=-1), batched_linear(shares, transposed(values))
    tops, largest, outputs = (x.unflatten(0, (heads, parts)) for x in by_part)
    mass = tops.sub(torch.amax(tops, dim=1, out=top)[:, None]).exp_().div_(largest)
    torch.sum(mass, dim=1, out=total)
    torch.div((mass[..., None] * outputs).sum(dim=1), total[..., None], out=output)


@dataclass(frozen=True, slots=True, eq=False)
class KeptMass:
    """Unnormalised attention of reference queries over the kept entries of one layer.

    A head has W columns; those without an entry have zero mass.

    Attributes:
        free: bool [G, W], entries that may be changed.
        mass: float32 [G, M, W], exp(logit - top) times multiplicities; 0 in columns without an
            entry and for entries that the query does not see.
        total: float32 [G, M], as in `Reference`.
        sink: float32 [G, M], as in `Reference`: mass that does not change.
        weights: float32 [M] or [G, M], as in `Reference`.
        scores: float32 [G, W], each free entry's share of its head's squared scores, or None.
    """

    free: Tensor
    mass: Tensor
    total: Tensor
    sink: Tensor
    weights: Tensor
    scores: Tensor | None

    def shares(self, multiplicity: Tensor | None = None) -> Tensor:
        """float32 [G, M, W]: attention over the kept entries, times `multiplicity` [G, W]."""
        mass = self.mass.clone() if multiplicity is None else self.mass * multiplicity[:, None]
        return mass.div_((mass.sum(dim=-1, keepdim=True) + self.sink[..., None]).clamp_min(1e-30))


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention(KeptMass):
    """`KeptMass` over packed entries, with their values and the output over all tokens.

    The columns of a head are its packed entries and the last prompt token; shorter heads are padded
    to W columns. The entries of the compressible region are free. Entries before the sequence have
    no columns: they count through `sink` and `before`.

    Attributes:
        place: int64 [E], head * W + column of each packed entry; that of the last token if it has
            none.
        columns: int64 [G, W], the packed entry of each column; arbitrary for the last token and
            padding.
        values: float32 [G, W, d] of the entries and the last token.
        before: float32 [G, M, d], as in `Reference`.
        output: float32 [G, M, d], as there.
    """

    place: Tensor
    columns: Tensor
    values: Tensor
    before: Tensor
    output: Tensor

    def apply(self, shares: Tensor, values: Tensor) -> Tensor:
        """float32 [G, M, d]: the output for these `shares` and `values` of the entries."""
        read = batched_linear(shares, transposed(values))
        return read.addcmul_(self.before, 1.0 - shares.sum(dim=-1, keepdim=True))


def kept_attention(reference: Reference, packed: RaggedEntries, region: Region) -> LayerAttention:
    """The attention of the reference queries over the kept entries of their layer."""
    device = reference.asked.device
    counts = packed.lengths
    width = -(-(int(counts.max()) + 1) // _COLUMNS) * _COLUMNS
    # One upload for both.
    first, counts = upload(torch.stack([packed.offsets[:-1], counts]), device)
    row, step = torch.arange(len(counts), device=device), torch.arange(width, device=device)
    place = torch.arange(packed.entries, device=device)
    place += (row * width - first).repeat_interleave(counts, output_size=packed.entries)
    is_entry = step < counts[:, None]
    columns = (first[:, None] + step).clamp_(max=max(0, packed.entries - 1))
    keys, values = packed.keys[columns].float(), packed.values[columns].float()
    # The last prompt token is not a packed entry.
    keys[row, counts], values[row, counts] = reference.last.float().unbind(1)
    positions = packed.positions[columns]
    positions[row, counts] = reference.length - 1
    # The last token counts once.
    entry_mass = packed.log_multiplicity[columns].exp().mul_(is_entry)
    entry_mass[row, counts] = 1.0
    mass = capped(batched_linear(reference.asked, keys), reference.softcap)
    mass.sub_(reference.top[..., None])
    if blind := len(reference.sees):
        unseen = positions[:, None, None] > reference.sees[:, None]
        mass.unflatten(1, (reference.group, -1))[:, :, -blind:].masked_fill_(unseen, -torch.inf)
    # A merged key can exceed every token's logit; clamp its mass to e^20.
    mass.clamp_(max=20.0).exp_().mul_(entry_mass[:, None])
    free = is_entry & (positions >= region.start) & (positions < region.end)
    if (scores := reference.scores) is not None:
        token = (positions - region.start).clamp_(0, scores.shape[1] - 1).long()
        scores = torch.where(free, scores.to(device).gather(1, token), 0.0).square_()
        scores /= scores.sum(dim=1, keepdim=True).clamp_min(1e-30)
    masses = (free, mass, reference.total, reference.sink, reference.weights, scores)
    return LayerAttention(*masses, place, columns, values, reference.before, reference.output)


def scatter(packed: Tensor, attention: LayerAttention, changed: Tensor) -> Tensor:
    """`packed` [E, ...] with `changed` [G, W, ...] in the free columns, `rounded` to its dtype."""
    free = attention.free.flatten()[attention.place].view(-1, *[1] * (packed.ndim - 1))
    return torch.where(free, rounded(changed.flatten(0, 1)[attention.place], packed.dtype), packed)
