"""`unit`: every slot loses 1 if dropped and nothing if merged, so only scores decide."""

from __future__ import annotations

import torch

from gracekv.tree.base import IntervalCosts, Nodes
from gracekv.tree.distortion import DISTORTIONS, Distortion, DistortionEvaluator
from gracekv.tree.tree_batch import TreeBatch, Workspace


class UnitEvaluator(DistortionEvaluator):
    """D = 0 and D^drop = 1 for every interval.

    Args:
        batch: the trees.
    """

    def __init__(self, batch: TreeBatch) -> None:
        self._batch = batch

    def __call__(self, nodes: Nodes) -> IntervalCosts:
        mass = self._batch.scores.flatten()[self._batch.token_rows(nodes, nodes.width)].float()
        return IntervalCosts(mass.new_zeros(2, *mass.shape), mass, torch.ones_like(mass[:, 0]))


@DISTORTIONS.register("unit", works_sharded=True)
class Unit(Distortion):
    """D = 0 and D^drop = 1: the auction is a top-k of scores (score-based eviction).

    Source: ours; it makes eviction methods special cases of the trees. Token scores replace the
    probe mass that picks extraction positions.

    Cost: none; no tensor of K or V is read.
    """

    def evaluator(self, batch: TreeBatch, workspace: Workspace) -> UnitEvaluator:
        return UnitEvaluator(batch)
