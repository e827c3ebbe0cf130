"""`evict`: keep original tokens, drop all others."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.cache.base import PACKERS, LayerToPack, Packer, RaggedEntries
from gracekv.kernels import ragged


@PACKERS.register("evict", works_sharded=True)
class EvictPacker(Packer):
    """Keep or drop tokens (eviction); a coarse node keeps its highest-scoring token.

    Nothing is merged, so every multiplicity is 1.

    Source: common to the published eviction methods, whose slots are single tokens or chunks kept
    token by token. Ours: a node of several tokens keeps the one with the highest score (ties: the
    earlier one).

    Cost: one gather of K and V.
    """

    by_entry = True
    represents = "token"

    def layer(self, given: LayerToPack) -> RaggedEntries:
        return best_tokens(given)


def best_tokens(layer: LayerToPack) -> RaggedEntries:
    """The highest-scoring token of each entry [E], unchanged; ties go to the earliest."""
    layout = layer.layout
    positions = layout.start.clone()
    coarse = layout.merged
    if len(coarse):
        head, start = layout.head[coarse], layout.start[coarse]
        count = layout.end[coarse] - start
        node, step = ragged.rows_and_steps(count, layout.merged_tokens)
        token = start[node] + step
        scores = layer.scores.to(count.device)[head[node], token - layout.origin]
        # By node, then by descending score: two stable sorts keep the earlier token first.
        order = scores.sort(descending=True, stable=True).indices
        order = order[node[order].sort(stable=True).indices]
        positions[coarse] = token[order[ragged.offsets(count)[:-1]]]
    return gather_entries(layer, positions)


def gather_entries(layer: LayerToPack, positions: Tensor) -> RaggedEntries:
    """A copy of each entry's token at `positions` (int64 [E], absolute)."""
    capture, layout = layer.capture, layer.layout
    source = layout.head * capture.spans.length + positions
    keys, values = (x.flatten(0, 1)[source] for x in (capture.keys, capture.values))
    positions = positions.to(torch.int32)
    log_m = torch.zeros(len(source), device=source.device, dtype=torch.float32)
    return RaggedEntries(keys, values, positions, log_m, layout.offsets)


def kept_in_context(layer: LayerToPack, packed: RaggedEntries) -> tuple[Tensor, Tensor, Tensor]:
    """Which packed entries are context tokens, and which context tokens are kept.

    Returns indices int64 [K] of these entries, ascending; their heads and their tokens' offsets in
    the context, int64 [2, K]; and bool [G, N_ctx], which tokens each head keeps.
    """
    spans, positions = layer.capture.spans, packed.positions.long()
    inside = (positions >= spans.context_start) & (positions < spans.context_end)
    entry = torch.nonzero(inside).flatten()
    at = torch.stack([layer.layout.head[entry], positions[entry] - spans.context_start])
    mask = torch.zeros(len(layer.scores), spans.context_length, dtype=torch.bool, device=at.device)
    mask[at[0], at[1]] = True
    return entry, at, mask
