"""The token interval of each entry of a packed layer, in packing order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.allocate.base import Selection
from gracekv.kernels import ragged
from gracekv.prefill import Prefill


@dataclass(frozen=True, slots=True, eq=False)
class LayerLayout:
    """The entries of one layer, head after head: prefix, kept nodes, recent window, suffix.

    Attributes:
        head: int64 [E], KV head of each entry.
        start: int64 [E], the first absolute position of its interval.
        end: int64 [E], exclusive; end - start > 1 only for merged nodes.
        offsets: int64 [G+1] on the CPU.
        origin: first compressible position, where R^tok starts.
        selected: int64 [E], which of the selection's entries it is; -1 outside the region.
    """

    head: Tensor
    start: Tensor
    end: Tensor
    offsets: Tensor
    origin: int
    selected: Tensor

    def of_selected(self, values: Tensor, otherwise: int) -> Tensor:
        """[E]: what was found for the selection's entries, `otherwise` for all others."""
        if not len(values):
            return values.new_full(self.selected.shape, otherwise)
        picked = values.to(self.selected.device)[self.selected.clamp(min=0)]
        return torch.where(self.selected < 0, otherwise, picked).to(values.dtype)


def layer_layouts(prefill: Prefill, selection: Selection) -> Iterator[LayerLayout]:
    """Layouts of all layers. The last prompt token is left out: decoding feeds it again."""
    for layer in range(prefill.layers):
        yield layer_layout(prefill, layer, selection, layer)


def layer_layout(prefill: Prefill, layer: int, selection: Selection, row: int) -> LayerLayout:
    """The layout of a layer whose entries are those of layer `row` of `selection`."""
    spans, heads = prefill.spans, prefill.kv_heads
    device = prefill.keys[layer].device
    bounds = selection.offsets[row * heads : (row + 1) * heads + 1]
    own = slice(int(bounds[0]), int(bounds[-1]))
    head = ragged.rows(bounds.diff()).to(device)
    first = selection.start[own].to(device).long()
    last = first + 1 if selection.end is None else selection.end[own].to(device).long()
    # Without suffix and recent window the region reaches to the last token, which is left out.
    covered = spans.length - 1
    last = last.clamp(max=covered)
    inside = first < last
    selected = torch.arange(own.start, own.stop, device=device)[inside]
    head, first, last = head[inside], first[inside], last[inside]

    # Positions outside the region are never compressed; they are the same in every head.
    origin, stop = selection.region
    fixed = torch.cat(
        [
            torch.arange(0, origin, device=device),
            torch.arange(min(stop, covered), covered, device=device),
        ]
    )
    head = torch.cat([head, torch.arange(heads, device=device).repeat_interleave(len(fixed))])
    first = torch.cat([first, fixed.repeat(heads)])
    last = torch.cat([last, fixed.repeat(heads) + 1])
    selected = torch.cat([selected, selected.new_full((heads * len(fixed),), -1)])
    order = (head * spans.length + first).argsort()
    counts = torch.bincount(head, minlength=heads).cpu()
    return LayerLayout(
        head=head[order],
        start=first[order],
        end=last[order],
        offsets=ragged.offsets(counts),
        origin=origin,
        selected=selected[order],
    )
