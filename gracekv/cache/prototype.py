"""`prototype`: merge nodes of several tokens into prototypes, copy single tokens."""

from __future__ import annotations

import torch

from gracekv.cache.base import PACKERS, LayerToPack, Packer, RaggedEntries
from gracekv.cache.evict import gather_entries
from gracekv.kernels import ragged
from gracekv.tree.merge import merge


@PACKERS.register("prototype", works_sharded=True)
class PrototypePacker(Packer):
    """A node of several tokens becomes one merged entry with its log multiplicity (the paper's).

    Source: the paper, "Frontier updates and physical packing".

    Cost: one gather of K and V and, per merged entry, one mean with keys un-rotated: 1 to 2 % of a
    prefill.
    """

    def layer(self, given: LayerToPack) -> RaggedEntries:
        capture, layout = given.capture, given.layout
        # One gather for all entries; the rows of merged entries are overwritten below.
        packed = gather_entries(given, layout.start)
        merged = layout.merged
        if len(merged):
            head, start, end = (x[merged] for x in (layout.head, layout.start, layout.end))
            node, step = ragged.rows_and_steps(end - start, layout.merged_tokens)
            position, head = start[node] + step, head[node]
            keys, values = (x[head, position].float() for x in (capture.keys, capture.values))
            weights = given.scores.to(keys.device)[head, position - layout.origin].float()
            intervals = (keys, values, weights, node, position, start, end)
            means = merge(*intervals, capture.rope, given.rule)
            packed.keys[merged] = means.keys.to(packed.dtype)
            packed.values[merged] = means.values.to(packed.dtype)
            packed.positions[merged] = means.positions.to(torch.int32)
            packed.log_multiplicity[merged] = means.multiplicity.log()
        return packed
