"""`evict`: original tokens only; all others are dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from gracekv.allocate.base import Selection
from gracekv.cache.base import PACKERS, Packer, RaggedCache, RaggedEntries
from gracekv.cache.layout import LayerLayout, layer_layouts
from gracekv.kernels import ragged
from gracekv.prefill import Prefill
from gracekv.tree.merge import PrototypeRule


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
