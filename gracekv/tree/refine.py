"""`Refiner` chooses the children of nodes from costs in a `CostTable`, mostly by `SplitRule`."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from gracekv.kernels.ragged import rows_and_steps
from gracekv.registry import Registry, Strategy
from gracekv.tree.base import Children, IntervalCosts, Nodes, Split
from gracekv.tree.tree_batch import TreeBatch


class CostTable:
    """The input of a refiner: V nodes of up to w tokens, on a grid [V, w] of their tokens.

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
        padding: bool [V, w], columns without a token.
        node_cost: D of each node, float64 [V, 1].
        cost_before: D of the tokens before k, float64 [V, w]; 0 at k = 0.
        cost_from: D of the tokens from k on, float64 [V, w]; 0 in padding.
        cost_after: D of the tokens after k, float64 [V, w]; 0 at the last token.
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
        self._batch, width = batch, intervals.mass.shape[1]
        self.last = nodes.length - 1
        self.step = torch.arange(width, device=self.last.device)
        self.padding = self.step > self.last[:, None]
        self.node_cost = node_cost[:, None]
        # Column k: D of the tokens before k, and of those from k on. There is nothing before the
        # first token, so prefixes start in the second column.
        columns = width + 1
        self._costs = node_cost.new_zeros(2, len(nodes), columns)
        strides = self._costs.stride(0) - 1, columns, 1
        inner = self._costs.as_strided(intervals.costs.shape, strides, 1)
        inner.copy_(intervals.costs).masked_fill_(self.padding, 0.0)
        self.cost_before = self._costs[0, :, :-1]
        self.cost_from, self.cost_after = self._costs[1, :, :-1], self._costs[1, :, 1:]

    @cached_property
    def _rows(self) -> Tensor:
        """int64 [V, w], flat row of token k; padding repeats the last one."""
        return self._batch.token_rows(self.nodes, len(self.step))

    def curvatures(self) -> Tensor:
        """kappa of token k, float64 [V, w]; padding repeats the last token's.

        Raises `ConfigError` if none was computed.
        """
        kappa = self._batch.known_curvature()[self._batch.region_start :]
        return kappa[self._rows % self._batch.scores.shape[1]]

    def floor_scores(self) -> Tensor | None:
        """Floor score of token k (-inf: no candidate), float64 [V, w]; None without a floor.

        Padding repeats the last token's.
        """
        forced = self._batch.forced
        return None if forced is None else forced.flatten()[self._rows]

    def outer_costs(self, low: Tensor, high: Tensor) -> Tensor:
        """D float64 [V, 2] of the tokens before `low` and from `high` on, int64 [V] each.

        Both are relative to the node's start, between 0 and its length.
        """
        return self._costs.gather(2, torch.stack([low, high])[..., None])[..., 0].T

    def split(self, children: Children) -> Split:
        """The nodes' `children` with their distortion.

        Each must be a single token, or start or end where its node does.
        """
        count = children.count
        row, place = rows_and_steps(count)
        first, last = children.start - self.nodes.start[row], children.end - self.nodes.start[row]
        is_prefix = first == 0
        cost = self._costs[(~is_prefix).long(), row, torch.where(is_prefix, last, first)]
        # Places without a child are at the node's end.
        start = self.nodes.end[:, None].repeat(1, int(count.max()))
        end, distortion = start.clone(), self.node_cost.new_zeros(start.shape)
        start[row, place], end[row, place] = children.start, children.end
        distortion[row, place] = torch.where(last - first > 1, cost, 0.0)
        return Split(start, end, distortion)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Cuts a node in two or extracts a token, whichever gains more per added entry.

    Gains may be negative. Ties go to the cut. Source: Eqs. (T8) to (T10).

    Attributes:
        cuts: cuts are considered at the midpoint and at the `cuts` tokens of highest kappa; None:
            nodes are not cut.
        reward: lambda_kappa, weight of the normalised curvature in a cut's gain.
        extracts: whether the salient token may be extracted. Floor candidates then must be.
    """

    cuts: int | None
    reward: float
    extracts: bool

    @property
    def uses_curvature(self) -> bool:
        """Whether kappa is read."""
        return bool(self.cuts) or self.reward > 0

    def __call__(self, table: CostTable) -> tuple[Tensor, Tensor]:
        """The two cuts of each node of `table`: int64 [V] each, relative to the nodes' starts.

        Both are equal if a node is cut in two; otherwise the token between them is extracted.
        """
        if self.cuts is None:
            token = salient_token(table)
            return token, token + 1
        low, gain = best_cut(table, self.cuts, self.reward)
        if not self.extracts:
            return low, low
        token = salient_token(table)
        extracts = table.forced | (extraction_utility(table, token) > gain)
        low = torch.where(extracts, token, low)
        return low, low + extracts

    def split(self, table: CostTable) -> Split:
        """The children of the nodes of `table`, with their distortion."""
        low, high = self(table)
        return Split.of_cuts(table.nodes, low, high, table.outer_costs(low, high))


def best_cut(table: CostTable, cuts: int, reward: float) -> tuple[Tensor, Tensor]:
    """The cut of largest D(I) - D(left) - D(right) + reward * kappa-hat, and that gain float64 [V].

    Cuts are int64 [V], relative to the node's start: the best of the midpoint and the `cuts` inner
    tokens of highest kappa (ties: the earlier), the first among equals. kappa-hat is kappa, min-max
    normalised over the node's own tokens, 0 if it is constant (departures 5).

    Source: Eqs. (T8) and (T10).
    """
    excluded = table.padding[:, 1:]
    gain = table.node_cost - table.cost_before[:, 1:] - table.cost_from[:, 1:]
    if cuts or reward:
        kappa = table.curvatures()
        if reward:
            low, high = kappa.aminmax(dim=1, keepdim=True)
            span = (high - low).clamp(min=torch.finfo(kappa.dtype).tiny)
            gain += reward * ((kappa[:, 1:] - low) / span)
    if cuts < gain.shape[1]:
        inner, excluded = excluded, table.step[1:] != (table.last[:, None] + 1) // 2
        if cuts:
            inside = kappa[:, 1:].masked_fill(inner, -torch.inf)
            order = inside.argsort(dim=1, descending=True, stable=True)
            excluded = excluded.scatter_(1, order[:, :cuts], False) | inner
    best = gain.masked_fill_(excluded, -torch.inf).max(dim=1)
    return best.indices + 1, best.values


def salient_token(table: CostTable) -> Tensor:
    """int64 [V]: the token to extract, relative to the node's start; ties go to the earlier one.

    The floor candidate with the highest floor score if the node has one, else the token with the
    largest mean normalised probe mass. Source: the paper, "Recursive refinement rule".
    """
    mass, score = table.mass, table.floor_scores()
    if score is not None:
        mass = torch.where(table.forced[:, None], score, mass)
    return mass.masked_fill(table.padding, -torch.inf).argmax(dim=1)


def extraction_utility(table: CostTable, token: Tensor) -> Tensor:
    """float64 [V]: gain per added entry of extracting `token`, int64 [V] from the node's start.

    Source: Eqs. (T9) and (T10); D of the extracted token is 0.
    """
    before, after = table.outer_costs(token, token + 1).unbind(1)
    # Two children for the node's first or last token, else three.
    added = (token % table.last).clamp(max=1) + 1
    return (table.node_cost[:, 0] - before - after) / added


class Refiner(Strategy, abc.ABC):
    """Chooses the children of every node, deterministically and independently.

    Every child is a single token, or starts or ends where its node does: distortion is computed
    only for these intervals.

    Attributes:
        exact_roots: whether roots stay as their original tokens, one entry each, not as a
            prototype.
        max_cost: maximum number of entries that one split adds.
    """

    works_sharded: ClassVar[bool] = True
    exact_roots: ClassVar[bool] = False
    max_cost: ClassVar[float] = 2

    @property
    def uses_curvature(self) -> bool:
        """Whether nodes are cut at curvature peaks, so that the table must have kappa."""
        rule = self.rule()
        return rule is not None and rule.uses_curvature

    def rule(self) -> SplitRule | None:
        """This refiner as a `SplitRule`, with which engines compute costs and split in one pass.

        None if it must be called with a table of all costs.
        """
        return None

    @abc.abstractmethod
    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        """The children of `nodes` (two tokens or more each), chosen from their costs."""


class RuleRefiner(Refiner):
    """A refiner that is a `SplitRule`."""

    @abc.abstractmethod
    def rule(self) -> SplitRule: ...

    def __call__(self, nodes: Nodes, table: CostTable) -> Children:
        # Engines apply the rule themselves.
        split = self.rule().split(table)
        kept = split.start < split.end
        return Children(kept.sum(dim=1), split.start[kept], split.end[kept])


REFINERS = Registry("refine", "into which children a node splits", Refiner)
