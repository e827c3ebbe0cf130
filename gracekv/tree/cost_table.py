"""`CostTable`: the distortion of every cut and extraction of some nodes, for refiners."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from gracekv.kernels.ragged import rows_and_steps
from gracekv.tree.nodes import Children, IntervalCosts, Nodes, Split
from gracekv.tree.tree_batch import TreeBatch


class CostTable:
    """What a refiner reads about V nodes of up to w tokens, on a grid [V, w] of their tokens.

    Args:
        nodes: the nodes.
        batch: their trees.
        intervals: D of their prefixes and suffixes.
        node_cost: D of the nodes themselves, float64 [V].
        forced: bool [V], nodes that hold a floor candidate.

    Attributes:
        nodes: as given.
        forced: as given.
        last: int64 [V], index of each node's last token.
        padding: bool [V, w], columns that hold no token.
        node_cost: D of each node, float64 [V, 1].
        cost_before: D of the tokens before k, float64 [V, w]; 0 at k = 0.
        cost_from: D of the tokens from k on, float64 [V, w]; 0 in padding.
        cost_after: D of the tokens after k, float64 [V, w]; 0 at the last.
        mass: mean normalised probe mass of token k, float32 [V, w].
    """

    def __init__(
        self,
        nodes: Nodes,
        batch: TreeBatch,
        intervals: IntervalCosts,
        node_cost: Tensor,
        forced: Tensor,
    ) -> None:
        self.nodes, self.forced, self.mass = nodes, forced, intervals.mass
        self._batch, self._width = batch, intervals.mass.shape[1]
        self.last = nodes.length - 1
        self.step = torch.arange(self._width, device=self.last.device)
        self.padding = self.step > self.last[:, None]
        self.node_cost = node_cost[:, None]
        # A column of zeros on both sides: nothing comes before the first token or after the last.
        self._costs = node_cost.new_zeros(2, len(nodes), self._width + 2)
        inner = self._costs[..., 1:-1]
        inner.copy_(intervals.costs).masked_fill_(self.padding, 0.0)
        self.cost_before = self._costs[0, :, :-2]
        self.cost_from, self.cost_after = inner[1], self._costs[1, :, 2:]

    @property
    def valid(self) -> Tensor:
        """bool [V, w], columns that hold a token."""
        return ~self.padding

    @cached_property
    def _rows(self) -> Tensor:
        """int64 [V, w], flat row of token k; padding repeats the last."""
        first = self._batch.first_row(self.nodes)
        return first[:, None] + torch.minimum(self.step, self.last[:, None])

    def curvatures(self) -> Tensor:
        """kappa of token k, float64 [V, w]; padding repeats the last token's."""
        return self._batch.curvatures(self._rows)

    def floor_scores(self) -> Tensor | None:
        """Floor score of token k (-inf: no candidate), float64 [V, w]; None without a floor.

        Padding repeats the last token's.
        """
        return self._batch.floor_scores(self._rows)

    def holds_candidate(self) -> Tensor:
        """bool [V]: nodes with a floor candidate inside."""
        return self.forced

    def outer_costs(self, low: Tensor, high: Tensor) -> Tensor:
        """D float64 [V, 2] of the tokens before `low` and from `high` on, int64 [V] each.

        Both count from the node's start and lie between 0 and its length.
        """
        index = torch.stack([low, high + 1])[..., None]
        return self._costs.gather(2, index)[..., 0].T

    def split(self, children: Children) -> Split:
        """The nodes' `children` with their distortion.

        Each must be a single token, or begin or end where its node does.
        """
        count = children.count
        row, place = rows_and_steps(count)
        first, last = children.start - self.nodes.start[row], children.end - self.nodes.start[row]
        is_prefix = first == 0
        # Columns of zeros come before and after.
        column = torch.where(is_prefix, last, first + 1)
        cost = self._costs[(~is_prefix).long(), row, column]
        places = int(count.max())
        # Places without a child lie at the node's end.
        start = self.nodes.end[:, None].repeat(1, places)
        end, distortion = start.clone(), self.node_cost.new_zeros(start.shape)
        start[row, place], end[row, place] = children.start, children.end
        distortion[row, place] = torch.where(last - first > 1, cost, 0.0)
        return Split(start, end, distortion)
