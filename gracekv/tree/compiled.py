"""`CompiledJudge`: the prototype's distortion through the compiled CPU kernel."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gracekv.rope import Rope
from gracekv.tree.distortion import Judge, NodeEnds, Nodes
from gracekv.tree.items import Items
from gracekv.tree.merge import PrototypeRule
from gracekv.tree.probed import ProbedHeads

if TYPE_CHECKING:
    from gracekv.tree.prototype import Prototype

# Tokens that one thread takes at a time: enough to hide the call, few enough to share the work.
_BLOCK = 1 << 10


class CompiledJudge(Judge):
    """D of node ends in the heads of some layers, on as many threads as torch uses.

    Args:
        weights: lambdas and epsilon.
        probed: the heads as the probes see them, on a CPU.
        items: their slots.
        rope: rotations of all positions.
        rule: how tokens merge.
    """

    def __init__(
        self, weights: Prototype, probed: ProbedHeads, items: Items, rope: Rope, rule: PrototypeRule
    ) -> None:
        from gracekv.kernels.ends_cpu import node_ends

        self._kernel: Any = node_ends
        self._items = items
        tensors = (
            probed.exponentials,
            probed.mass,
            probed.plain_keys,
            probed.key_norms,
            probed.values,
            probed.worth,
            probed.queries.mT,
            probed.top,
            probed.inverse_total,
            probed.seeing,
            probed.before,
            # The table of a sharded model lies with its first layer.
            rope.cos.to(probed.values.device),
            rope.sin.to(probed.values.device),
        )
        self._fixed = (
            *(x.contiguous().numpy() for x in tensors),
            items.region_start,
            float(weights.lambda_z),
            float(weights.lambda_m),
            float(weights.epsilon),
            float(rule.uniform_base),
            float(rule.epsilon),
            rule.multiplicity,
        )

    def __call__(self, nodes: Nodes) -> NodeEnds:
        count, width = len(nodes.item), int(nodes.length.max())
        sides, mass, drop = (
            torch.zeros(2, count, width), torch.zeros(count, width), torch.empty(count),
        )  # fmt: skip
        with torch.profiler.record_function("node_ends (compiled)"):
            self._fill(nodes, (sides[0], sides[1], mass, drop))
        return NodeEnds(sides, mass, drop)

    def _fill(self, nodes: Nodes, outputs: tuple[Tensor, ...]) -> None:
        first = self._items.offset(nodes.item, nodes.start).numpy()
        head, length = self._items.head(nodes.item).numpy(), nodes.length.numpy()
        found = self._items.lifted(nodes.item, nodes.start, nodes.end)
        lifted = (torch.full_like(nodes.item, -1) if found is None else found).numpy()
        out = [x.numpy() for x in outputs]

        size = max(1, _BLOCK // int(nodes.length.max()))

        def run(at: int) -> None:
            block = slice(at, at + size)
            where = (x[block] for x in (head, first, length, lifted))
            self._kernel(*where, *self._fixed, *(x[block] for x in out))

        blocks, threads = range(0, len(head), size), torch.get_num_threads()
        if threads == 1 or len(blocks) == 1:
            for at in blocks:
                run(at)
            return
        # The kernel lets go of Python's lock, and nodes do not depend on one another.
        list(_pool(os.getpid(), threads).map(run, blocks))


@functools.lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads of this process, kept; a forked one has none of its parent's.

    Starting them at every call would cost as much as a small call, and memory for each.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix="gracekv")
