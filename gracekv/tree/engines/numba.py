"""The engine `numba`: a compiled kernel for CPUs that can also choose the splits."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from gracekv.kernels.addresses import address
from gracekv.kernels.compiled import on_all_threads
from gracekv.tree.base import IntervalCosts, Nodes, RootCosts, Split, Splitter
from gracekv.tree.distortion import DistortionEvaluator
from gracekv.tree.engines.base import EngineInputs
from gracekv.tree.refine import Refiner, SplitRule
from gracekv.tree.tree_batch import TreeBatch

# Fields of `DistortionArgs` that are float64; other floating-point fields are float32.
_DOUBLE = ("kappa", "forced", "node_cost", "part_costs")


class NumbaEvaluator(DistortionEvaluator):
    """D of nodes in the heads of some layers, on as many threads as torch uses.

    Args:
        inputs: the inputs, on a CPU.
    """

    def __init__(self, inputs: EngineInputs) -> None:
        from gracekv.kernels.matmul import COLUMNS

        self._batch, attention = inputs.batch, inputs.attention
        heads, probes, dim = attention.queries.shape
        padding = -probes % COLUMNS
        tensors = inputs.tensors() | {"probe_mass": attention.mass}
        tensors["queries"] = attention.queries.mT
        for name in ("queries", "max_logit", "inverse_sum"):
            tensors[name] = torch.nn.functional.pad(tensors[name], (0, padding))
        for name in ("cos", "sin"):
            tensors[name] = tensors[name].float()
        # The kernel's arguments are addresses, so the tensors must be kept alive.
        self._tensors = {name: x.contiguous() for name, x in tensors.items()}
        positions, rotary_dim = tensors["cos"].shape
        self._numbers = inputs.numbers() | {
            "heads": heads,
            "probes": probes,
            "padded_probes": probes + padding,
            "dim": dim,
            "positions": positions,
            "rotary_dim": rotary_dim,
            "multiplicity": inputs.batch.context.rule.multiplicity,
        }

    def __call__(self, nodes: Nodes) -> IntervalCosts:
        count, width = len(nodes), nodes.width
        costs = torch.zeros(2, count, width, dtype=torch.float32)
        mass = torch.zeros(count, width, dtype=torch.float32)
        drop = torch.empty(count, dtype=torch.float32)
        self.run(nodes, {"intervals": costs, "mass": mass, "drop": drop}, {})
        return IntervalCosts(costs, mass, drop)

    def splitter(self, refiner: Refiner) -> Splitter | None:
        rule = refiner.rule()
        return None if rule is None else NumbaSplitter(self, self._batch, rule)

    def run(self, nodes: Nodes, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Run the kernel on V >= 1 nodes.

        Args:
            nodes: the nodes.
            tensors: contiguous fields [V, ...] of `numba_kernel.DistortionArgs`, which say whether
                it evaluates nodes, splits them or splits roots.
            numbers: its other fields.
        """
        from gracekv.tree.engines.numba_kernel import DistortionArgs, distortion_kernel

        counter = ctypes.c_int64(0)
        places = {"head": self._batch.head(nodes.tree), "first": self._batch.offset(nodes)}
        tensors = self._tensors | tensors | places | {"length": nodes.length}
        arguments = DistortionArgs(
            **{name: _address(name, x) for name, x in tensors.items()},
            **self._numbers,
            **numbers,
            counter=ctypes.addressof(counter),
            nodes=len(nodes),
            max_length=nodes.width,
        )
        with torch.profiler.record_function("distortion (numba)"):
            on_all_threads(distortion_kernel(), ctypes.addressof(arguments))


class NumbaSplitter(Splitter):
    """Computes only the costs that the split rule compares, and splits in the same pass.

    Args:
        evaluator: computes the costs in these heads.
        batch: the nodes' trees.
        rule: how nodes split.

    Raises:
        ConfigError: the rule reads curvature but none was computed.
    """

    def __init__(self, evaluator: NumbaEvaluator, batch: TreeBatch, rule: SplitRule) -> None:
        self._evaluator = evaluator
        self._tensors: dict[str, Tensor] = {}
        if rule.uses_curvature:
            self._tensors["kappa"] = batch.known_curvature().contiguous()
        if batch.forced is not None:
            self._tensors["forced"] = batch.forced.contiguous()
        cuts = -1 if rule.cuts is None else rule.cuts
        self._numbers = {"cuts": cuts, "reward": rule.reward, "extracts": rule.extracts}

    def roots(self, nodes: Nodes) -> RootCosts:
        distortion = torch.empty(len(nodes), dtype=torch.float64)
        drop = torch.empty(len(nodes), dtype=torch.float32)
        low, high, part_costs = self._cuts(nodes, {"node_cost": distortion, "drop": drop})

        def split(chosen: Tensor, forced: Tensor) -> Split:
            return Split.of_cuts(nodes[chosen], low[chosen], high[chosen], part_costs[chosen])

        return RootCosts(distortion, drop.double(), split)

    def __call__(self, nodes: Nodes, distortion: Tensor, forced: Tensor) -> Split:
        return Split.of_cuts(nodes, *self._cuts(nodes, {"node_cost": distortion.contiguous()}))

    def _cuts(self, nodes: Nodes, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        low, high = torch.empty_like(nodes.tree), torch.empty_like(nodes.tree)
        part_costs = torch.empty(len(low), 2, dtype=torch.float64)
        tensors = self._tensors | tensors | {"low": low, "high": high, "part_costs": part_costs}
        self._evaluator.run(nodes, tensors, self._numbers)
        return low, high, part_costs


def _address(name: str, field: Tensor) -> int:
    """The address of a kernel argument, whose floating dtype is independent of torch's default."""
    dtype = torch.float64 if name in _DOUBLE else torch.float32
    return address(name, field, dtype if field.is_floating_point() else field.dtype, *field.shape)
