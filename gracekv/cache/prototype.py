"""`prototype`: merged nodes as prototypes, single tokens as they are."""

from __future__ import annotations

import torch

from gracekv.cache.base import PACKERS, LayerToPack, Packer, RaggedEntries
from gracekv.kernels import ragged
from gracekv.tree.merge import merge


@PACKERS.register("prototype", works_sharded=True)
class PrototypePacker(Packer):
    """A node of several tokens becomes one merged entry with its log multiplicity (the paper's).

    Source: the paper, "Frontier updates and physical packing".

    Cost: one gather of K and V and one mean a merged entry, its keys un-rotated: 1 to 2 % of a
    prefill.
    """

    def layer(self, given: LayerToPack) -> RaggedEntries:
        prefill, layout, layer = given.prefill, given.layout, given.number
        length, dim = prefill.spans.length, prefill.head_dim
        keys = prefill.keys[layer].reshape(-1, dim)
        values = prefill.values[layer].reshape(-1, dim)
        # One gather for everything; the rows of merged entries are overwritten below.
        source = layout.head * length + layout.start
        packed_keys, packed_values = keys[source], values[source]
        positions = layout.start.to(torch.int32)
        log_multiplicity = torch.zeros(len(source), device=keys.device)

        merged = torch.nonzero(layout.end - layout.start > 1).flatten()
        if len(merged):
            head, start, end = (x[merged] for x in (layout.head, layout.start, layout.end))
            count = end - start
            node, step = ragged.rows_and_steps(count)
            position, head = start[node] + step, head[node]
            row = head * length + position
            weights = given.scores.to(keys.device)[head, position - layout.origin].float()
            rope = prefill.rope_of(layer)
            numbers = keys[row].float(), values[row].float()
            made = merge(*numbers, weights, start, end, rope, given.rule)
            packed_keys[merged] = made.keys.to(keys.dtype)
            packed_values[merged] = made.values.to(keys.dtype)
            positions[merged] = made.positions.to(torch.int32)
            log_multiplicity[merged] = made.multiplicity.log()
        return RaggedEntries(
            packed_keys, packed_values, positions, log_multiplicity, layout.offsets
        )
