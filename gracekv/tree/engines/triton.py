"""The engine `triton`: one kernel for NVIDIA GPUs.

Nothing is tuned at run time, so equal machines grow the same trees. A test compiles the kernel for
its GPUs; importing this module does not import triton.
"""

from __future__ import annotations

from typing import Any

import torch

from gracekv.tree.base import IntervalCosts, Nodes
from gracekv.tree.distortion import DistortionEvaluator
from gracekv.tree.engines.base import EngineInputs

# Maximum probes times features per program, a warp whose queries and sums fill its registers; more
# probes are divided among several programs.
_LARGEST_BLOCK = 1024


class TritonEvaluator(DistortionEvaluator):
    """D of nodes in the heads of some layers; one program per node, direction and probe block.

    Nodes may have any length; a node's costs do not depend on other nodes, bitwise.

    Args:
        inputs: the inputs, on a GPU (or, interpreted, on a CPU).
    """

    def __init__(self, inputs: EngineInputs) -> None:
        from gracekv.tree.engines.triton_kernel import interval_costs

        self._kernel: Any = interval_costs
        heads, probes, dim = inputs.attention.queries.shape
        self._arguments = {name: x.contiguous() for name, x in inputs.tensors().items()}
        starts = inputs.batch.slot_start
        self._arguments |= inputs.numbers() | {"slot_start": starts, "slots": len(starts) // heads}
        half, rule = inputs.rope.cos.shape[1] // 2, inputs.batch.context.rule
        self._constants = constants(probes, dim, half, rule.multiplicity)

    def __call__(self, nodes: Nodes) -> IntervalCosts:
        count, width = len(nodes), nodes.width
        parts = -(-self._constants["P"] // self._constants["BLOCK_P"])
        sizes = [2 * count * width, count * width, count]
        sums = self._arguments["values"].new_empty(parts, sum(sizes))
        with torch.cuda.device_of(sums):
            self._kernel[(count, 2, parts)](
                tree=nodes.tree,
                begin=nodes.start,
                length=nodes.length,
                sums=sums,
                nodes=count,
                width=width,
                **self._arguments,
                **self._constants,
                enable_fp_fusion=True,
            )
        # Each part has the sums over its own probes.
        costs, mass, drop = (sums[0] if parts == 1 else sums.sum(0)).split(sizes)
        return IntervalCosts(costs.view(2, count, width), mass.view(count, width), drop)


def constants(probes: int, dim: int, half: int, multiplicity: bool) -> dict[str, Any]:
    """The kernel's constants for P probes of `dim` features, of which 2 `half` are rotated."""
    block_d = 1 << (dim - 1).bit_length()
    block_p = min(1 << (probes - 1).bit_length(), _LARGEST_BLOCK // block_d)
    sizes = {"P": probes, "D": dim, "HALF": half, "MULTIPLICITY": multiplicity}
    blocks = {"BLOCK_P": block_p, "BLOCK_D": block_d, "LANES": max(1, block_d // 16)}
    return sizes | blocks | {"num_warps": 1}
