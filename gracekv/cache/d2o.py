"""`d2o`: dropped tokens merge into the kept entry of the most similar key."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from gracekv.cache.base import PACKERS, LayerToPack, Packer, RaggedEntries
from gracekv.cache.evict import best_tokens, kept_in_context

# Maximum bytes of cosines that `best_matches` holds at once.
_BLOCK = 64 * 2**20


@PACKERS.register("d2o")
class D2OPacker(Packer):
    r"""Merges dropped tokens into the kept token with the most similar key (D2O).

    For dropped token i of a KV head, u_i is the largest cosine between its post-RoPE key and those
    of the kept context tokens, and c(i) is the token that attains it (ties go to the earlier one).
    tau is the mean of all u_i of the layer. Tokens with u_i >= tau are merged, the others are
    dropped. With E_c the tokens that are merged into c, both keys and values become

        x_c <- (e x_c + sum_{i in E_c} exp(u_i) x_i) / (e + sum_{i in E_c} exp(u_i))

    where e = exp(1) is the weight of c, from its similarity to itself. Recent tokens may be
    targets, the prefix and the suffix never are. Kept tokens into which nothing is merged keep
    their exact bits. The selection decides which tokens stay; a node of several tokens keeps the
    one with the highest score, as in `evict`.

    Source: Wan et al. (2024), D2O, arXiv:2406.13035, Eqs. 9-12. Ours: everything happens once after
    prefill, so the threshold has no moving average; each head accepts tokens by its own u_i (the
    released code mixes heads by rank, and shrinks norms).

    Cost: the cosines between all dropped and all kept keys, in blocks: O(N E d) for a head that
    keeps E tokens.
    """

    represents = "mixture"

    def layer(self, given: LayerToPack) -> RaggedEntries:
        capture, packed = given.capture, best_tokens(given)
        # Kept tokens of the context are the possible targets.
        entry, _, is_kept = kept_in_context(given, packed)
        context = slice(capture.spans.context_start, capture.spans.context_end)
        keys = capture.keys[:, context]
        source, target, similarity = best_matches(keys, is_kept)
        accepted = similarity.double() >= similarity.double().mean()
        source, target, similarity = (x[accepted] for x in (source, target, similarity))
        if not len(source):
            return packed

        weight = similarity.exp()
        # Segments of sorted targets: sums have the same order on every run and device.
        order = target.sort(stable=True).indices
        touched, count = torch.unique_consecutive(target[order], return_counts=True)
        size = torch.segment_reduce(weight[order], "sum", lengths=count, axis=0, unsafe=True)

        def merged(packed_rows: Tensor, rows: Tensor) -> Tensor:
            changed, targets = packed_rows.clone(), packed_rows[entry][touched].float()
            sources = weight[order, None] * rows.flatten(0, 1)[source][order].float()
            total = torch.segment_reduce(sources, "sum", lengths=count, axis=0, unsafe=True)
            result = (math.e * targets + total) / (math.e + size)[:, None]
            changed[entry[touched]] = result.to(changed.dtype)
            return changed

        values = merged(packed.values, capture.values[:, context])
        return dataclasses.replace(packed, keys=merged(packed.keys, keys), values=values)


def best_matches(
    keys: Tensor, is_kept: Tensor, *, block: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Each dropped token's most similar kept token of its head, by cosine.

    Args:
        keys: [G, N, d] of one layer's context.
        is_kept: bool [G, N].
        block: dropped tokens of each head that are compared at once; None takes as many as fit in
            `_BLOCK` bytes, so memory does not grow with dropped x kept.

    Returns three tensors [M]: each dropped token as g * N + t (int64), its target as an index into
    all kept tokens ordered by head and position (int64; ties go to the earlier one), and their
    cosine (float32). Dropped tokens of heads that keep nothing are excluded.
    """
    heads, length = is_kept.shape
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    counts = is_kept.sum(dim=1)
    stays, goes = int(counts.max()), int((length - counts).max())
    if stays == 0 or goes == 0:
        none = torch.empty(0, dtype=torch.int64, device=keys.device)
        return none, none, torch.empty(0, device=keys.device, dtype=torch.float32)
    # Kept tokens of each head, then dropped ones, both by position; short heads are padded with the
    # start of the other part, which is masked below.
    order = (~is_kept).byte().sort(dim=1, stable=True).indices
    place = torch.arange(length, device=keys.device)
    pool = unit.gather(1, order[:, :stays, None].expand(-1, -1, unit.shape[-1]))
    padding = (place[:stays] >= counts[:, None])[:, None]
    dropped = order.roll(goes, dims=1)[:, :goes]
    real = ~is_kept.gather(1, dropped) & (counts > 0)[:, None]

    rows = block or max(1, _BLOCK // (4 * heads * stays))
    tops = []
    for first in range(0, goes, rows):
        part = dropped[:, first : first + rows]
        some = unit.gather(1, part[..., None].expand(-1, -1, unit.shape[-1]))
        tops.append((some @ pool.transpose(1, 2)).masked_fill_(padding, -torch.inf).max(dim=-1))
    similarity, nearest = (torch.cat(parts, dim=1) for parts in zip(*tops, strict=True))
    start = (counts.cumsum(0) - counts)[:, None]
    row = torch.arange(heads, device=keys.device)[:, None] * length
    return (row + dropped)[real], (start + nearest)[real], similarity[real]
