"""What merging or dropping the ends of a node costs, and the interface of what knows it.

Refinement only ever asks for intervals that begin or end where their node does: the two sides of a
cut, the two sides of an extracted token. So a node of n tokens has 2n intervals of interest, and
all of them come from one running pass in each direction.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gracekv.prefill import Needs
from gracekv.registry import Registry, Strategy
from gracekv.tree.context import TreeContext
from gracekv.tree.items import Items
from gracekv.tree.workspace import Workspace

if TYPE_CHECKING:
    from gracekv.tree.refine import Refiner
    from gracekv.tree.split import Splitter


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """Some nodes, ordered by item and start.

    Attributes:
        item: int64 [V], head * J + slot.
        start: int64 [V] relative to the slot.
        end: int64 [V] exclusive.
    """

    item: Tensor
    start: Tensor
    end: Tensor

    @property
    def length(self) -> Tensor:
        """int64 [V], tokens."""
        return self.end - self.start

    def __getitem__(self, rows: Tensor) -> Nodes:
        """The nodes at `rows` (indices or a mask), in that order."""
        return Nodes(self.item[rows], self.start[rows], self.end[rows])


@dataclass(frozen=True, slots=True, eq=False)
class IntervalCosts:
    """D of every interval that shares an end with its node, of V nodes of up to w tokens.

    Columns beyond a node's length hold anything, and so do all but the two sides of the token that
    will be lifted out of a node (`Items.lifted`), where that is certain.

    Attributes:
        sides: float32 [2, V, w]: D of the node's tokens up to k and including it, then D of those
            from k on.
        mass: float32 [V, w]: mean normalised probe mass of the node's token k over the probes
            that see the whole node.
        drop: D^drop float32 [V] of the whole node.
    """

    sides: Tensor
    mass: Tensor
    drop: Tensor

    @property
    def prefix(self) -> Tensor:
        """[V, w]: D of the tokens up to and including k."""
        return self.sides[0]

    @property
    def suffix(self) -> Tensor:
        """[V, w]: D of the tokens from k on."""
        return self.sides[1]

    def __getitem__(self, rows: Tensor) -> IntervalCosts:
        """Those of the nodes at `rows`, in that order."""
        return IntervalCosts(self.sides[:, rows], self.mass[rows], self.drop[rows])


class DistortionEvaluator(abc.ABC):
    """Answers for the heads of some layers."""

    @abc.abstractmethod
    def __call__(self, nodes: Nodes) -> IntervalCosts:
        """The ends of V >= 1 nodes, best of similar length: the widest makes all rows wide."""

    def splitter(self, refiner: Refiner) -> Splitter | None:
        """What judges and refines in one pass; None: the refiner looks up what was judged."""
        return None


class Distortion(Strategy, abc.ABC):
    """How much is lost when an interval is stored as one entry, or not at all.

    Deterministic, float32 or better. D of a single token is exactly 0.
    """

    @abc.abstractmethod
    def evaluator(
        self, context: TreeContext, layers: Sequence[int], items: Items, space: Workspace
    ) -> DistortionEvaluator:
        """Who answers for the items of `layers`, which are on one device.

        `space` lends scratch memory to one call of the evaluator at a time, and memory for what the
        evaluator keeps: the next evaluator with that space takes it over.
        """

    def needs(self) -> Needs:
        """What the prefill must have captured."""
        return Needs()


DISTORTIONS: Registry[Distortion] = Registry("distortion", "what merging or dropping tokens costs")
Distortion.registry = DISTORTIONS


class CostTable:
    """What a refiner may ask about V nodes of up to w tokens, on a grid [V, w] of their tokens.

    Args:
        nodes: the nodes.
        items: what is known of their heads and slots.
        ends: D of their ends.
        whole: D of the nodes themselves, float64 [V].

    Attributes:
        nodes: as given.
        valid: bool [V, w], places that hold a token.
        whole: D of each node, float64 [V, 1].
        before: D of the tokens before k, float64 [V, w]; 0 at k = 0.
        onward: D of the tokens from k on, float64 [V, w].
        after: D of the tokens after k, float64 [V, w]; 0 at the last.
        mass: mean normalised probe mass of token k, float32 [V, w].
    """

    def __init__(self, nodes: Nodes, items: Items, ends: IntervalCosts, whole: Tensor) -> None:
        self.nodes, self._items, self._ends = nodes, items, ends
        step = torch.arange(ends.mass.shape[1], device=nodes.start.device)
        self.valid = step < nodes.length[:, None]
        prefix, suffix = ends.sides.double()
        self.whole = whole[:, None]
        self.before = torch.nn.functional.pad(prefix[:, :-1], (1, 0))
        self.onward = suffix
        self.after = torch.nn.functional.pad(suffix[:, 1:], (0, 1))
        self.after[step + 1 >= nodes.length[:, None]] = 0.0
        self.mass = ends.mass

    @property
    def _tokens(self) -> Tensor:
        """int64 [V, w], relative to the slots; padding repeats the node's last token."""
        nodes = self.nodes
        step = torch.arange(self.valid.shape[1], device=nodes.start.device)
        return nodes.start[:, None] + torch.minimum(step, nodes.length[:, None] - 1)

    def curvatures(self) -> Tensor:
        """kappa of token k, float64 [V, w]."""
        return self._items.curvatures(self.nodes.item, self._tokens)

    def floor_scores(self) -> Tensor | None:
        """Floor score of token k (-inf: no candidate), float64 [V, w]; None without a floor."""
        return self._items.floor_scores(self.nodes.item, self._tokens)

    def hold_candidates(self) -> Tensor:
        """bool [V]: nodes with a floor candidate inside."""
        return self._items.holds_candidate(self.nodes.item, self.nodes.start, self.nodes.end)

    def of_children(self, row: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """D float64 [C] of intervals [start, end) [C] of the nodes at `row` [C].

        Each must be a single token, or begin or end where its node does.
        """
        flat, width = self._ends.sides.flatten(), self.mass.shape[1]
        origin = self.nodes.start[row]
        leads = start == origin
        place = row * width + torch.where(leads, end - 1, start) - origin
        found = flat[torch.where(leads, place, place + len(flat) // 2)]
        return torch.where(end - start > 1, found, 0.0).double()
