"""`NumbaEvaluator` and `NumbaSplitter`: the prototype's distortion through the CPU kernel."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.kernels import omp_threads
from gracekv.rope import Rope
from gracekv.tree.distortion import DistortionEvaluator, IntervalCosts, Nodes
from gracekv.tree.items import Items
from gracekv.tree.merge import PrototypeRule
from gracekv.tree.probe_attention import ProbeAttention
from gracekv.tree.refine import Refiner, Rule
from gracekv.tree.split import Roots, Split, Splitter

if TYPE_CHECKING:
    from gracekv.tree.prototype import Prototype


class NumbaEvaluator(DistortionEvaluator):
    """D of node ends in the heads of some layers, on as many threads as torch uses.

    Args:
        weights: lambdas and epsilon.
        probed: the heads as the probes see them, on a CPU.
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
        from gracekv.kernels.products_cpu import COLUMNS

        self._items = items
        heads, probes, dim = probed.queries.shape
        missing = -probes % COLUMNS
        device = probed.values.device
        # The table of a sharded model lies with its first layer.
        cos, sin = (x.to(device).float().contiguous() for x in (rope.cos, rope.sin))
        tensors = {
            "exponentials": probed.exponentials,
            "mass_of": probed.mass,
            "plain_keys": probed.plain_keys,
            "key_norms": probed.key_norms,
            "values": probed.values,
            "worth": probed.worth,
            "readers": functional.pad(probed.queries.mT, (0, missing)),
            "top": functional.pad(probed.top, (0, missing)),
            "inverse_total": functional.pad(probed.inverse_total, (0, missing)),
            "seeing": probed.seeing,
            "before": probed.before,
            "cos": cos,
            "sin": sin,
        }
        # Tasks hold addresses, so the tensors must live as long as this.
        self._tensors = {name: x.contiguous() for name, x in tensors.items()}
        self._numbers = {
            "heads": heads,
            "tokens": len(probed.seeing),
            "probes": probes,
            "padded": probes + missing,
            "dim": dim,
            "positions": cos.shape[0],
            "rotated": cos.shape[1],
            "region_start": items.region_start,
            "multiplicity": rule.multiplicity,
            "lambda_z": weights.lambda_z,
            "lambda_m": weights.lambda_m,
            "epsilon": weights.epsilon,
            "uniform_base": rule.uniform_base,
            "rule_epsilon": rule.epsilon,
        }

    def __call__(self, nodes: Nodes) -> IntervalCosts:
        from gracekv.kernels.ends_cpu import EVALUATE

        count, width = len(nodes.item), int(nodes.length.max())
        lifted = self._items.lifted(nodes.item, nodes.start, nodes.end)
        if lifted is None:
            lifted = torch.full_like(nodes.item, -1)
        sides, mass, drop = (
            torch.zeros(2, count, width), torch.zeros(count, width), torch.empty(count),
        )  # fmt: skip
        outputs = {"prefix": sides[0], "suffix": sides[1], "mass": mass, "drop": drop}
        self.fill(nodes, EVALUATE, {"lifted": lifted.contiguous()} | outputs, {})
        return IntervalCosts(sides, mass, drop)

    def splitter(self, refiner: Refiner) -> Splitter | None:
        rule = refiner.rule()
        return None if rule is None else NumbaSplitter(self, self._items, rule)

    def fill(
        self, nodes: Nodes, mode: int, tensors: dict[str, Tensor], numbers: dict[str, Any]
    ) -> None:
        """Run the kernel on V >= 1 nodes.

        Args:
            nodes: which.
            mode: `EVALUATE`, `SPLIT` or `SPLIT_ROOTS` of `gracekv.kernels.ends_cpu`.
            tensors: contiguous fields of its `Task` for that mode, [V, ...] as said there.
            numbers: its other fields.
        """
        from gracekv.kernels.ends_cpu import Task, ends

        length = nodes.length
        counter = ctypes.c_int64(0)
        given = self._tensors | tensors
        given["head"] = self._items.head(nodes.item)
        given["first"] = self._items.offset(nodes.item, nodes.start)
        given["length"] = length
        task = Task(
            **{name: x.data_ptr() for name, x in given.items()},
            **self._numbers,
            **numbers,
            counter=ctypes.addressof(counter),
            nodes=len(length),
            widest=int(length.max()),
            mode=mode,
        )
        with torch.profiler.record_function("node_ends (numba)"):
            omp_threads.run(ends(), ctypes.addressof(task))


class NumbaSplitter(Splitter):
    """Judges of each node only what its split is chosen by, and chooses in the same pass.

    Args:
        evaluator: knows the heads.
        items: what is known of the nodes' slots.
        rule: how nodes split.

    Raises:
        ConfigError: the rule reads a curvature, and none was computed.
    """

    def __init__(self, evaluator: NumbaEvaluator, items: Items, rule: Rule) -> None:
        self._evaluator = evaluator
        self._tensors: dict[str, Tensor] = {}
        if rule.cuts or rule.reward:
            self._tensors["kappa"] = items.known_curvature().contiguous()
        if items.forced is not None:
            self._tensors["forced"] = items.forced.contiguous()
        cuts = -1 if rule.cuts is None else rule.cuts
        self._numbers = {"most": cuts, "reward": rule.reward, "lifts": rule.lifts}

    def roots(self, nodes: Nodes) -> Roots:
        from gracekv.kernels.ends_cpu import SPLIT_ROOTS

        distortion = torch.empty(len(nodes.item), dtype=torch.float64)
        drop = torch.empty(len(nodes.item))
        low, high, parts = self._cuts(nodes, SPLIT_ROOTS, {"whole": distortion, "drop": drop})

        def split(chosen: Tensor) -> Split:
            return _split(nodes[chosen], low[chosen], high[chosen], parts[chosen])

        return Roots(distortion, drop.double(), split)

    def __call__(self, nodes: Nodes, distortion: Tensor) -> Split:
        from gracekv.kernels.ends_cpu import SPLIT

        if not len(nodes.item):
            none = torch.empty(0, dtype=torch.int64)
            return Split(none, none, none, none.double())
        return _split(nodes, *self._cuts(nodes, SPLIT, {"whole": distortion.contiguous()}))

    def _cuts(
        self, nodes: Nodes, mode: int, tensors: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        low, high = torch.empty_like(nodes.item), torch.empty_like(nodes.item)
        parts = torch.empty(len(low), 2, dtype=torch.float64)
        tensors = self._tensors | tensors | {"low": low, "high": high, "parts": parts}
        self._evaluator.fill(nodes, mode, tensors, self._numbers)
        return low, high, parts


def _split(nodes: Nodes, low: Tensor, high: Tensor, parts: Tensor) -> Split:
    """Of nodes with cuts int64 [V] counted from their starts, and D [V, 2] of the outer parts."""
    bounds = torch.stack([nodes.start, nodes.start + low, nodes.start + high, nodes.end], dim=1)
    start, end = bounds[:, :3], bounds[:, 1:]
    real = start < end
    # What lies between two cuts is a single token.
    distortion = torch.stack([parts[:, 0], torch.zeros(len(low)).double(), parts[:, 1]], dim=1)
    return Split(real.sum(dim=1), start[real], end[real], distortion[real])
