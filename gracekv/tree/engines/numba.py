"""The engine `numba`: a compiled kernel for CPUs."""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from gracekv.kernels import omp_threads
from gracekv.tree.distortion import DistortionEvaluator
from gracekv.tree.engines.base import EngineInputs
from gracekv.tree.nodes import IntervalCosts, Nodes


class NumbaEvaluator(DistortionEvaluator):
    """D of nodes in the heads of some layers, on as many threads as torch uses.

    Args:
        inputs: on a CPU.
    """

    def __init__(self, inputs: EngineInputs) -> None:
        from gracekv.kernels.matmul import COLUMNS

        self._batch, attention = inputs.batch, inputs.attention
        heads, probes, dim = attention.queries.shape
        padding = -probes % COLUMNS
        tensors = inputs.tensors() | {"probe_mass": attention.mass}
        tensors["queries"] = attention.queries.mT
        for name in ("queries", "max_logit", "inverse_sum"):
            tensors[name] = functional.pad(tensors[name], (0, padding))
        for name in ("cos", "sin"):
            tensors[name] = tensors[name].float()
        # The kernel's arguments hold addresses, so the tensors must be kept.
        self._tensors = {name: x.contiguous() for name, x in tensors.items()}
        positions, rotary_dim = tensors["cos"].shape
        self._numbers = inputs.numbers() | {
            "heads": heads,
            "probes": probes,
            "padded_probes": probes + padding,
            "dim": dim,
            "positions": positions,
            "rotary_dim": rotary_dim,
            "multiplicity": inputs.rule.multiplicity,
        }

    def __call__(self, nodes: Nodes) -> IntervalCosts:
        from gracekv.tree.engines.numba_kernel import DistortionArgs, distortion_kernel

        count, width = len(nodes), int(nodes.length.max())
        costs, mass = torch.zeros(2, count, width), torch.zeros(count, width)
        drop, counter = torch.empty(count), ctypes.c_int64(0)
        tensors = self._tensors | {
            "head": self._batch.head(nodes.tree),
            "first": self._batch.offset(nodes),
            "length": nodes.length,
            "prefix": costs[0],
            "suffix": costs[1],
            "mass": mass,
            "drop": drop,
        }
        arguments = DistortionArgs(
            **{name: x.data_ptr() for name, x in tensors.items()},
            **self._numbers,
            counter=ctypes.addressof(counter),
            nodes=count,
            max_length=width,
        )
        with torch.profiler.record_function("distortion (numba)"):
            omp_threads.run(distortion_kernel(), ctypes.addressof(arguments))
        return IntervalCosts(costs, mass, drop)
