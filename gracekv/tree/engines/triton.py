"""The engine `triton`: one kernel for NVIDIA GPUs.

Its block sizes are a static table, by node length and probes: nothing is tuned at run time, so the
same trees grow on every machine of a kind. A test compiles every entry for its GPUs; importing this
module does not import triton.
"""

from __future__ import annotations

from typing import Any

import torch

from gracekv.tree.distortion import DistortionEvaluator
from gracekv.tree.engines.base import EngineInputs
from gracekv.tree.nodes import IntervalCosts, Nodes

# Matrix products take 16 rows or more, and powers of two.
_MIN_BLOCK = 16
# Probes of a program; more are divided among several programs.
_MAX_PROBES = 64


class TritonEvaluator(DistortionEvaluator):
    """D of nodes in the heads of some layers, a program per node and direction.

    Nodes may be of any length. The costs of a node do not depend on other nodes, to the bit, except
    through the longest node of a call: with 16 tokens or fewer, nodes are read 16 tokens at a time,
    else 32.

    Args:
        inputs: the inputs, on a GPU (or, interpreted, on a CPU).
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
            "MULTIPLICITY": inputs.batch.context.rule.multiplicity,
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


def padded_size(size: int) -> int:
    """The power of two that `size` is padded to."""
    return max(_MIN_BLOCK, 1 << (size - 1).bit_length())


def block_sizes(width: int, probes: int) -> dict[str, int]:
    """The configuration for nodes of up to `width` tokens.

    BLOCK_T tokens are read at a time and combined with BLOCK_C earlier ones, for BLOCK_P probes of
    a program; a product has BLOCK_F features of keys or values.

    Args:
        width: tokens of the longest node.
        probes: P.
    """
    # Chosen by the registers that compiled code uses (ours): a product's operands fill them, so its
    # inner dimension is the smallest, nothing is loaded ahead, and 32 tokens take eight warps.
    tokens, warps = (16, 4) if width <= 16 else (32, 8)
    sizes = {"BLOCK_T": tokens, "BLOCK_C": _MIN_BLOCK, "BLOCK_F": _MIN_BLOCK}
    sizes["BLOCK_P"] = min(padded_size(probes), _MAX_PROBES)
    return {**sizes, "num_warps": warps, "num_stages": 1}
