"""`CostTable`: the distortion of every cut and extraction of some nodes, for refiners."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.kernels.ragged import rows
from gracekv.tree.nodes import Children, IntervalCosts, Nodes, Split
from gracekv.tree.tree_batch import TreeBatch


class CostTable:
    """What a refiner reads about V nodes of up to w tokens, on a grid [V, w] of their tokens.

    Args:
        nodes: the nodes.
        batch: their trees.
        intervals: D of their prefixes and suffixes.
        node_cost: D of the nodes themselves, float64 [V].

    Attributes:
        nodes: as given.
        valid: bool [V, w], columns that hold a token.
        node_cost: D of each node, float64 [V, 1].
        cost_before: D of the tokens before k, float64 [V, w]; 0 at k = 0.
        cost_from: D of the tokens from k on, float64 [V, w].
        cost_after: D of the tokens after k, float64 [V, w]; 0 at the last.
        mass: mean normalised probe mass of token k, float32 [V, w].
    """

    def __init__(
        self, nodes: Nodes, batch: TreeBatch, intervals: IntervalCosts, node_cost: Tensor
    ) -> None:
        self.nodes, self._batch, self._intervals = nodes, batch, intervals
        self._width = intervals.mass.shape[1]
        step = torch.arange(self._width, device=nodes.start.device)
        self.valid = step < nodes.length[:, None]
        prefix, suffix = intervals.costs.double()
        self.node_cost = node_cost[:, None]
        self.cost_before = functional.pad(prefix[:, :-1], (1, 0))
        self.cost_from = suffix
        self.cost_after = functional.pad(suffix[:, 1:], (0, 1))
        self.cost_after[step + 1 >= nodes.length[:, None]] = 0.0
        self.mass = intervals.mass

    def curvatures(self) -> Tensor:
        """kappa of token k, float64 [V, w]."""
        return self._batch.curvatures(self.nodes, self._width)

    def floor_scores(self) -> Tensor | None:
        """Floor score of token k (-inf: no candidate), float64 [V, w]; None without a floor."""
        return self._batch.floor_scores(self.nodes, self._width)

    def holds_candidate(self) -> Tensor:
        """bool [V]: nodes with a floor candidate inside."""
        return self._batch.holds_candidate(self.nodes)

    def split(self, children: Children) -> Split:
        """The nodes' `children` with their distortion.

        Each must be a single token, or begin or end where its node does.
        """
        flat, row = self._intervals.costs.flatten(), rows(children.count)
        start, end, node_start = children.start, children.end, self.nodes.start[row]
        is_prefix = start == node_start
        place = row * self._width + torch.where(is_prefix, end - 1, start) - node_start
        cost = flat[torch.where(is_prefix, place, place + len(flat) // 2)]
        distortion = torch.where(end - start > 1, cost, 0.0).double()
        return Split(children.count, start, end, distortion)
