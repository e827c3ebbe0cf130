"""The engine `triton`: one kernel for NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import torch

from gracekv.tree.distortion import DistortionEvaluator
from gracekv.tree.engines.base import EngineInputs
from gracekv.tree.engines.triton_blocks import block_sizes, padded_size
from gracekv.tree.nodes import IntervalCosts, Nodes


class TritonEvaluator(DistortionEvaluator):
    """D of nodes in the heads of some layers, a program per node and direction.

    Nodes may be of any length. The costs of a node do not depend on other nodes, to the bit, except
    through the longest node of a call: with 16 tokens or fewer, nodes are read 16 tokens at a time,
    else 32.

    Args:
        inputs: on a GPU (or, interpreted, on a CPU).
    """

    def __init__(self, inputs: EngineInputs) -> None:
        from gracekv.tree.engines.triton_kernel import interval_costs

        self._kernel: Any = interval_costs
        self._batch = inputs.batch
        _, probes, dim = inputs.attention.queries.shape
        half = inputs.rope.cos.shape[1] // 2
        self._tensors = {name: x.contiguous() for name, x in inputs.tensors().items()}
        self._numbers = inputs.numbers() | {"features": dim, "half_features": half}
        self._constants = {
            "P": probes,
            "D": dim,
            "HALF": half,
            "MULTIPLICITY": inputs.rule.multiplicity,
            "BLOCK_D": padded_size(dim),
        }

    def __call__(self, nodes: Nodes) -> IntervalCosts:
        count, width = len(nodes), int(nodes.length.max())
        sizes = block_sizes(width, self._constants["P"])
        parts = -(-self._constants["P"] // sizes["BLOCK_P"])
        values = self._tensors["values"]
        costs = values.new_empty(parts, 2, count, width)
        mass = values.new_empty(parts, count, width)
        drop = values.new_empty(parts, count)
        with torch.cuda.device_of(values):
            self._kernel[(count, 2, parts)](
                head=self._batch.head(nodes.tree),
                first=self._batch.offset(nodes),
                length=nodes.length,
                **self._tensors,
                costs=costs,
                mass=mass,
                drop=drop,
                nodes=count,
                width=width,
                **self._numbers,
                **self._constants,
                **sizes,
                enable_fp_fusion=True,
            )
        if parts == 1:
            return IntervalCosts(costs[0], mass[0], drop[0])
        # Each part has the sums over its own probes.
        return IntervalCosts(costs.sum(0), mass.sum(0), drop.sum(0))
