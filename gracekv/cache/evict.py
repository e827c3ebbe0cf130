"""`evict`: original tokens only; and the layout of packed entries, which all packers share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from gracekv.allocate.base import Selection
from gracekv.cache.base import PACKERS, Packer, RaggedCache, RaggedEntries
from gracekv.kernels import ragged
from gracekv.prefill import Prefill
from gracekv.tree.merge import PrototypeRule


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
        yield _layout(prefill, selection, layer)


def _layout(prefill: Prefill, selection: Selection, layer: int) -> LayerLayout:
    spans, heads = prefill.spans, prefill.kv_heads
    device = prefill.keys[layer].device
    bounds = selection.offsets[layer * heads : (layer + 1) * heads + 1]
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


@final
@PACKERS.register("evict")
@dataclass(frozen=True)
class EvictPacker(Packer):
    """Tokens are kept or dropped; of a coarse node the token of the highest score stays (eviction).

    Nothing is merged, so every multiplicity is 1.

    Source: the common ground of the published eviction methods, whose slots are single tokens or
    chunks kept token by token. Ours: of a node of several tokens the one of the highest score
    stays (ties: the earlier one).

    Cost: one gather of K and V.
    """

    works_sharded: ClassVar[bool] = True
    represents: ClassVar[Literal["node", "token", "mixture"]] = "token"

    def __call__(
        self,
        prefill: Prefill,
        selection: Selection,
        scores: Tensor,
        rule: PrototypeRule,
        columns: Tensor | None = None,
    ) -> RaggedCache:
        layers = []
        for layer, layout in enumerate(layer_layouts(prefill, selection)):
            layers.append(gather_tokens(prefill, layer, layout, best_tokens(layout, scores[layer])))
        return RaggedCache(tuple(layers), length=prefill.spans.length - 1)


def best_tokens(layout: LayerLayout, scores: Tensor) -> Tensor:
    """int64 [E]: the position of each entry's token of the highest score, the earliest of equals.

    `scores` is [G, N], R^tok of the layer.
    """
    positions = layout.start.clone()
    coarse = torch.nonzero(layout.end - layout.start > 1).flatten()
    if not len(coarse):
        return positions
    head, start = layout.head[coarse], layout.start[coarse]
    count = layout.end[coarse] - start
    node, step = ragged.rows_and_steps(count)
    token = start[node] + step
    own = scores.to(count.device)[head[node], token - layout.origin]
    # By node, and inside a node by falling score: two stable sorts keep the earlier token first.
    order = own.sort(descending=True, stable=True).indices
    order = order[node[order].sort(stable=True).indices]
    positions[coarse] = token[order[ragged.offsets(count)[:-1]]]
    return positions


def gather_tokens(
    prefill: Prefill, layer: int, layout: LayerLayout, positions: Tensor
) -> RaggedEntries:
    """The layer's own keys and values at `positions` (int64 [E]) of `layout`'s entries."""
    length, dim = prefill.spans.length, prefill.head_dim
    source = layout.head * length + positions
    return RaggedEntries(
        keys=prefill.keys[layer].reshape(-1, dim)[source],
        values=prefill.values[layer].reshape(-1, dim)[source],
        positions=positions.to(torch.int32),
        log_multiplicity=torch.zeros(len(source), device=source.device),
        offsets=layout.offsets,
    )
