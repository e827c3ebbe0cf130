"""`SplitRule`: cuts and extractions, the one implementation behind four refiners."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.tree.cost_table import CostTable
from gracekv.tree.nodes import Children, Nodes


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """One way to refine each node.

    Attributes:
        low: int64 [V] first cut.
        high: int64 [V] second cut; equal to `low` for a binary split.
        utility: [V] float64 gain per added entry (rho); NaN-free, may be negative.
    """

    low: Tensor
    high: Tensor
    utility: Tensor

    def children(self, nodes: Nodes) -> Children:
        """The children of `nodes` by this proposal."""
        return Children.of_cuts(nodes, self.low, self.high)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """A node is cut in two, or a token is extracted, whichever gains more per added entry.

    Gains may be negative. Ties go to the cut. Source: Eqs. (T8) to (T10).

    Attributes:
        cuts: a cut is considered at the midpoint and at the `cuts` tokens of highest kappa; None:
            nodes are not cut.
        reward: lambda_kappa, weight of the normalised curvature in a cut's gain.
        extracts: whether the salient token may be extracted. A floor candidate then must be.
    """

    cuts: int | None
    reward: float
    extracts: bool

    @property
    def uses_curvature(self) -> bool:
        """Whether kappa is read."""
        return bool(self.cuts) or self.reward > 0

    def children(self, nodes: Nodes, table: CostTable) -> Children:
        """The children of `nodes`, two tokens or more each."""
        if self.cuts is None:
            return salient_extraction(nodes, table).children(nodes)
        cut = best_cut(nodes, table, self.cuts, self.reward)
        if not self.extracts:
            return cut.children(nodes)
        return better(nodes, table, cut, salient_extraction(nodes, table))


def better(nodes: Nodes, table: CostTable, cut: Proposal, extraction: Proposal) -> Children:
    """The children by the extraction where it gains more or a floor candidate forces it."""
    chosen = table.holds_candidate() | (extraction.utility > cut.utility)
    low, high = (
        torch.where(chosen, getattr(extraction, x), getattr(cut, x)) for x in ("low", "high")
    )
    return Children.of_cuts(nodes, low, high)


def normalized_curvature(kappa: Tensor, valid: Tensor) -> Tensor:
    """kappa-hat [V, w]: min-max normalised over each node's own tokens, 0 where constant.

    Source: departures 5.
    """
    low = kappa.masked_fill(~valid, torch.inf).amin(dim=1, keepdim=True)
    span = kappa.masked_fill(~valid, -torch.inf).amax(dim=1, keepdim=True) - low
    return torch.where(span > 0, (kappa - low) / span.clamp(min=torch.finfo(span.dtype).tiny), 0.0)


def cut_candidates(nodes: Nodes, inner: Tensor, kappa: Tensor | None, k: int | None) -> Tensor:
    """bool [V, w]: the midpoint and the `k` inner tokens of highest kappa (ties: the earlier).

    All inner tokens if `k` is None. Source: Eq. (T8).
    """
    if k is None or (kappa is not None and k >= inner.shape[1] - 1):
        return inner
    midpoint = (nodes.start + nodes.end) // 2 - nodes.start
    chosen = torch.arange(inner.shape[1], device=inner.device) == midpoint[:, None]
    if kappa is not None and k > 0:
        order = kappa.masked_fill(~inner, -torch.inf).argsort(dim=1, descending=True, stable=True)
        chosen = chosen.scatter(1, order[:, :k], True)
    return chosen & inner


def best_cut(nodes: Nodes, table: CostTable, cuts: int | None, reward: float) -> Proposal:
    """The cut of largest D(I) - D(left) - D(right) + reward * kappa-hat, among `cut_candidates`.

    Ties go to the smaller position. Source: Eqs. (T8) and (T10).
    """
    inner = table.valid.clone()
    inner[:, 0] = False
    kappa = table.curvatures() if cuts or reward else None
    chosen = cut_candidates(nodes, inner, kappa, cuts)
    gain = table.node_cost - table.cost_before - table.cost_from
    if kappa is not None and reward:
        gain += reward * normalized_curvature(kappa, table.valid)
    best = gain.masked_fill_(~chosen, -torch.inf).max(dim=1)
    position = nodes.start + best.indices
    return Proposal(low=position, high=position, utility=best.values)


def salient_token(table: CostTable) -> Tensor:
    """int64 [V]: the token to extract, counted from the node's start; ties go to the earlier one.

    The floor candidate of the highest floor score if the node holds one, else the token of the
    largest mean normalised probe mass. Source: the paper, "Recursive refinement rule".
    """
    mass, score = table.mass.double(), table.floor_scores()
    if score is not None:
        has_candidate = (score > -torch.inf).any(dim=1, keepdim=True)
        mass = torch.where(has_candidate, score, mass)
    return mass.masked_fill(~table.valid, -torch.inf).argmax(dim=1)


def extraction_utilities(nodes: Nodes, table: CostTable) -> Tensor:
    """float64 [V, w]: gain per added entry of extracting token k: D(I) - D(before) - D(after).

    Source: Eqs. (T9) and (T10); D of the extracted token is 0.
    """
    step = torch.arange(table.valid.shape[1], device=nodes.start.device)
    added = (step > 0).long() + (step + 1 < nodes.length[:, None])
    return (table.node_cost - table.cost_before - table.cost_after) / added


def salient_extraction(nodes: Nodes, table: CostTable) -> Proposal:
    """Extraction of each node's salient token."""
    token = salient_token(table)
    utility = extraction_utilities(nodes, table).gather(1, token[:, None])[:, 0]
    low = nodes.start + token
    return Proposal(low=low, high=low + 1, utility=utility)
