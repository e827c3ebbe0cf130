"""The engine `triton`: one kernel for NVIDIA GPUs.

Nothing is tuned at run time, so the same trees grow on every machine of a kind. A test compiles the
kernel for its GPUs; importing this module does not import triton.
"""

from __future__ import annotations

from typing import Any

import torch

from gracekv.tree.base import IntervalCosts, Nodes
from gracekv.tree.distortion import DistortionEvaluator
from gracekv.tree.engines.base import EngineInputs

# Probes times features of a program, whose queries and sums fill registers; more probes are divided
# among several programs.
_LARGEST_BLOCK = 8192


class TritonEvaluator(DistortionEvaluator):
    """D of nodes in the heads of some layers, a program per node and direction.

    Nodes may be of any length; the costs of a node do not depend on other nodes, to the bit.

    Args:
        inputs: the inputs, on a GPU (or, interpreted, on a CPU).
    """

    def __init__(self, inputs: EngineInputs) -> None:
        from gracekv.tree.engines.triton_kernel import interval_costs

        self._kernel: Any = interval_costs
        self._batch = inputs.batch
        _, probes, dim = inputs.attention.queries.shape
        self._arguments = {name: x.contiguous() for name, x in inputs.tensors().items()}
        self._arguments |= inputs.numbers()
        self._constants = constants(
            probes, dim, inputs.rope.cos.shape[1] // 2, inputs.batch.context.rule.multiplicity
        )

    def __call__(self, nodes: Nodes) -> IntervalCosts:
        count, width = len(nodes), nodes.width
        parts = -(-self._constants["P"] // self._constants["BLOCK_P"])
        values = self._arguments["values"]
        costs = values.new_empty(parts, 2, count, width)
        mass = values.new_empty(parts, count, width)
        drop = values.new_empty(parts, count)
        with torch.cuda.device_of(values):
            self._kernel[(count, 2, parts)](
                head=self._batch.head(nodes.tree),
                first=self._batch.offset(nodes),
                length=nodes.length,
                costs=costs,
                mass=mass,
                drop=drop,
                nodes=count,
                width=width,
                **self._arguments,
                **self._constants,
            )
        if parts == 1:
            return IntervalCosts(costs[0], mass[0], drop[0])
        # Each part has the sums over its own probes.
        return IntervalCosts(costs.sum(0), mass.sum(0), drop.sum(0))


def constants(probes: int, dim: int, half: int, multiplicity: bool) -> dict[str, Any]:
    """The kernel's constants for P probes of `dim` features, of which 2 `half` are rotated."""
    block_d = 1 << (dim - 1).bit_length()
    block_p = min(1 << (probes - 1).bit_length(), _LARGEST_BLOCK // block_d)
    warps = 4 if block_p * block_d < _LARGEST_BLOCK else 8
    return {
        "P": probes, "D": dim, "HALF": half, "MULTIPLICITY": multiplicity,
        "BLOCK_P": block_p, "BLOCK_D": block_d, "num_warps": warps,
    }  # fmt: skip
