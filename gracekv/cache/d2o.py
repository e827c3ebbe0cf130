"""`d2o`: dropped tokens merge into the kept entry of the most similar key."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.cache.base import PACKERS, LayerToPack, Packer, RaggedEntries
from gracekv.cache.evict import best_tokens, kept_in_context

# Bytes of cosines that `best_matches` holds at once.
_BLOCK = 64 * 2**20


@PACKERS.register("d2o")
class D2OPacker(Packer):
    r"""Dropped tokens merge into the kept token of the most similar key, if similar enough (D2O).

    In each KV head, u_i is the largest cosine between the post-RoPE keys of dropped token i and of
    a kept context token, c(i) that token (ties: the earlier), and tau the mean of all u_i of the
    layer. Tokens with u_i >= tau merge, the others are dropped. With E_c the tokens merged into c,

        x_c <- (e x_c + sum_{i in E_c} exp(u_i) x_i) / (e + sum_{i in E_c} exp(u_i))

    for keys and values alike; e = exp(1) is the weight of c's similarity to itself. Recent tokens
    may be targets; prefix and suffix never are. Kept tokens that are no target are unchanged to the
    bit. The selection decides which tokens stay; of a node of several tokens the one of the highest
    score stays, as with `evict`.

    Source: Wan et al. (2024), D2O, arXiv:2406.13035, Eqs. 9-12. Ours: one event after prefill, so
    the threshold's moving average never starts; each head accepts by its own u_i (the released code
    mixes heads by rank, and shrinks norms).

    Cost: cosines of all dropped with all kept keys, in blocks: O(N E d) for the E kept tokens of a
    head.
    """

    represents: ClassVar[Literal["node", "token", "mixture"]] = "mixture"

    def layer(self, given: LayerToPack) -> RaggedEntries:
        capture, packed = given.capture, best_tokens(given)
        # The targets.
        entry, _, kept = kept_in_context(given, packed)
        context = slice(capture.spans.context_start, capture.spans.context_end)
        keys = capture.keys[:, context]
        source, target, similarity = best_matches(keys, kept)
        accepted = similarity.double() >= similarity.double().mean()
        source, target, similarity = (x[accepted] for x in (source, target, similarity))
        if not len(source):
            return packed

        def merged(packed_rows: Tensor, rows: Tensor) -> Tensor:
            changed = packed_rows.clone()
            sources = rows.flatten(0, 1)[source]
            result, touched = _merged(packed_rows[entry], sources, target, similarity)
            changed[entry[touched]] = result.to(changed.dtype)
            return changed

        values = merged(packed.values, capture.values[:, context])
        return dataclasses.replace(packed, keys=merged(packed.keys, keys), values=values)


def _merged(
    targets: Tensor, sources: Tensor, target: Tensor, similarity: Tensor
) -> tuple[Tensor, Tensor]:
    """New rows [C, d] float32 of the targets that tokens merge into, and their numbers.

    Args:
        targets: [K, d] kept rows.
        sources: [M, d] accepted rows.
        target: int64 [M] into `targets`.
        similarity: u float32 [M].
    """
    weight = similarity.exp()
    # Segments of sorted targets: the same sums in the same order on every run and device.
    order = target.sort(stable=True).indices
    touched, count = torch.unique_consecutive(target[order], return_counts=True)
    rows = weight[order, None] * sources[order].float()
    total = torch.segment_reduce(rows, "sum", lengths=count, axis=0, unsafe=True)
    size = torch.segment_reduce(weight[order], "sum", lengths=count, axis=0, unsafe=True)
    merged = (math.e * targets[touched].float() + total) / (math.e + size)[:, None]
    return merged, touched


def best_matches(
    keys: Tensor, kept: Tensor, *, block: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Each dropped token's most similar kept token of its head, by cosine.

    Args:
        keys: [G, N, d] of one layer's context.
        kept: bool [G, N].
        block: dropped tokens of each head at once; None: as many as `_BLOCK` bytes hold, so that
            memory does not grow with dropped x kept.

    Returns M rows: the dropped token (int64, g * N + t), its target (int64, its number among all
    kept tokens in the order of (head, position); ties: the earlier), and the cosine (float32).
    Heads that keep nothing have no rows.
    """
    heads, length = kept.shape
    unit = functional.normalize(keys.float(), dim=-1)
    counts = kept.sum(dim=1)
    stays, goes = int(counts.max()), int((length - counts).max())
    if stays == 0 or goes == 0:
        none = torch.empty(0, dtype=torch.int64, device=keys.device)
        return none, none, torch.empty(0, device=keys.device, dtype=torch.float32)
    # Kept tokens of each head, then dropped ones, both by position; short heads are padded by the
    # start of the other part, which is masked below.
    order = (~kept).byte().sort(dim=1, stable=True).indices
    place = torch.arange(length, device=keys.device)
    pool = unit.gather(1, order[:, :stays, None].expand(-1, -1, unit.shape[-1]))
    padding = (place[:stays] >= counts[:, None])[:, None]
    left = order.roll(goes, dims=1)[:, :goes]
    real = ~kept.gather(1, left) & (counts > 0)[:, None]

    rows = block or max(1, _BLOCK // (4 * heads * stays))
    best, match = [], []
    for first in range(0, goes, rows):
        part = left[:, first : first + rows]
        some = unit.gather(1, part[..., None].expand(-1, -1, unit.shape[-1]))
        cosine = (some @ pool.transpose(1, 2)).masked_fill_(padding, -torch.inf)
        top = cosine.max(dim=-1)
        best.append(top.values)
        match.append(top.indices)
    similarity, chosen = torch.cat(best, dim=1), torch.cat(match, dim=1)
    before = (counts.cumsum(0) - counts)[:, None]
    row = torch.arange(heads, device=keys.device)[:, None] * length
    return (row + left)[real], (before + chosen)[real], similarity[real]
