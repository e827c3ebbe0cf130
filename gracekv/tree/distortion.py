"""The interface of distortions: what merging or dropping the tokens of an interval costs."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torch import Tensor

from gracekv.prefill import Needs
from gracekv.registry import Registry, Strategy
from gracekv.tree.context import TreeContext
from gracekv.tree.nodes import IntervalCosts, Nodes
from gracekv.tree.refine import Refiner
from gracekv.tree.split import Splitter
from gracekv.tree.tree_batch import TreeBatch
from gracekv.tree.workspace import Workspace


class DistortionEvaluator(abc.ABC):
    """Computes the distortion of nodes in the trees of some layers.

    A node of n tokens has 2n intervals of interest, its prefixes and suffixes; all of them come
    from one running pass in each direction.
    """

    @abc.abstractmethod
    def __call__(self, nodes: Nodes) -> IntervalCosts:
        """The costs of V >= 1 nodes, best of similar length: the longest sets the grid's width."""

    def splitter(self, refiner: Refiner) -> Splitter | None:
        """A splitter that computes costs and splits in one pass; None: there is none."""
        return None


class Distortion(Strategy, abc.ABC):
    """How much is lost when an interval is stored as one entry, or not at all.

    Deterministic, float32 or better. D of a single token is exactly 0.
    """

    @abc.abstractmethod
    def evaluator(
        self,
        context: TreeContext,
        layers: Sequence[int],
        batch: TreeBatch,
        workspace: Workspace,
    ) -> DistortionEvaluator:
        """Return the evaluator for the trees of these layers, which are on one device.

        Args:
            context: the inputs of the forest.
            layers: whose trees.
            batch: these trees.
            workspace: scratch memory for one call of the evaluator at a time, and memory for what
                the evaluator keeps: the next evaluator with that workspace overwrites it.
        """

    def probes(self, context: TreeContext) -> Tensor | None:
        """Positions whose queries the evaluators read, int64 [P] ascending; None: none."""
        return None

    def needs(self) -> Needs:
        """What the prefill must have captured."""
        return Needs()


DISTORTIONS: Registry[Distortion] = Registry("distortion", "what merging or dropping tokens costs")
Distortion.registry = DISTORTIONS
