"""`SplitRule`: cuts and extractions, the one implementation behind three refiners."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.tree.cost_table import CostTable


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

    def __call__(self, table: CostTable) -> tuple[Tensor, Tensor]:
        """Where the nodes of `table` are cut, twice: int64 [V] each, counted from their starts.

        Both are the same where a node is cut in two; else the token between them is extracted.
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


def best_cut(table: CostTable, cuts: int, reward: float) -> tuple[Tensor, Tensor]:
    """The cut of largest D(I) - D(left) - D(right) + reward * kappa-hat, and that gain float64 [V].

    Cuts are int64 [V], counted from the node's start: of the midpoint and the `cuts` inner tokens
    of highest kappa (ties: the earlier) the best, and of equals the first. kappa-hat is kappa,
    min-max normalised over the node's own tokens, 0 where it is constant (departures 5).

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
            order = (
                kappa[:, 1:]
                .masked_fill(inner, -torch.inf)
                .argsort(dim=1, descending=True, stable=True)
            )
            excluded = excluded.scatter_(1, order[:, :cuts], False) | inner
    best = gain.masked_fill_(excluded, -torch.inf).max(dim=1)
    return best.indices + 1, best.values


def salient_token(table: CostTable) -> Tensor:
    """int64 [V]: the token to extract, counted from the node's start; ties go to the earlier one.

    The floor candidate of the highest floor score if the node holds one, else the token of the
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
    added = token.clamp(max=1) + (table.last - token).clamp(max=1)
    return (table.node_cost[:, 0] - before - after) / added
