"""`TritonEvaluator`: the prototype's distortion through the fused kernel for NVIDIA GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gracekv.kernels.ends_tiles import padded, tiles
from gracekv.rope import Rope
from gracekv.tree.distortion import DistortionEvaluator, IntervalCosts, Nodes
from gracekv.tree.items import Items
from gracekv.tree.merge import PrototypeRule
from gracekv.tree.probe_attention import ProbeAttention

if TYPE_CHECKING:
    from gracekv.tree.prototype import Prototype


class TritonEvaluator(DistortionEvaluator):
    """D of node ends in the heads of some layers, a program per node and direction.

    Nodes may be of any length. A node's bits depend on the node alone, but for its group: nodes of
    16 tokens or fewer among themselves are read 16 tokens at a time, all others 32.

    Args:
        weights: lambdas and epsilon.
        probed: the heads as the probes see them, on a GPU (or, interpreted, on a CPU).
        items: their slots.
        rope: rotations of all positions.
        rule: how tokens merge.
    """

    def __init__(
        self,
        weights: Prototype,
        probed: ProbeAttention,
        items: Items,
        rope: Rope,
        rule: PrototypeRule,
    ) -> None:
        from gracekv.kernels.ends_triton import node_ends

        self._kernel: Any = node_ends
        self._items = items
        device = probed.values.device
        self._tensors = tuple(
            x.to(device).contiguous()
            for x in (
                probed.exponentials,
                probed.plain_keys,
                probed.key_norms,
                probed.values,
                probed.worth,
                probed.queries,
                probed.top,
                probed.inverse_total,
                probed.seeing,
                probed.before,
                rope.cos,
                rope.sin,
            )
        )
        self._numbers = (
            items.region_start,
            float(weights.lambda_z),
            float(weights.lambda_m),
            float(weights.epsilon),
            float(rule.uniform_base),
            float(rule.epsilon),
        )
        dim = probed.values.shape[1]
        self._constants = {
            "P": probed.queries.shape[1],
            "D": dim,
            "HALF": rope.cos.shape[1] // 2,
            "MULTIPLICITY": rule.multiplicity,
            "BLOCK_D": padded(dim),
        }

    def __call__(self, nodes: Nodes) -> IntervalCosts:
        tokens = len(self._tensors[8])
        count, width = len(nodes.item), int(nodes.length.max())
        tile = tiles(width, self._constants["P"])
        parts = -(-self._constants["P"] // tile.probes)
        values = self._tensors[3]
        sides = values.new_empty(parts, 2, count, width)
        mass = values.new_empty(parts, count, width)
        drop = values.new_empty(parts, count)
        with torch.cuda.device_of(values):
            self._kernel[(count, 2, parts)](
                self._items.head(nodes.item),
                self._items.offset(nodes.item, nodes.start),
                nodes.length,
                *self._tensors,
                sides,
                mass,
                drop,
                tokens,
                count,
                width,
                *self._numbers,
                self._constants["D"],
                self._constants["HALF"],
                **self._constants,
                BLOCK_T=tile.tokens,
                BLOCK_C=tile.past,
                BLOCK_P=tile.probes,
                BLOCK_F=tile.features,
                num_warps=tile.warps,
                num_stages=tile.stages,
                enable_fp_fusion=True,
            )
        if parts == 1:
            return IntervalCosts(sides[0], mass[0], drop[0])
        # Each part has the sums over its own probes.
        return IntervalCosts(sides.sum(0), mass.sum(0), drop.sum(0))
