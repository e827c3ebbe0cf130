"""`TreeContext`, the inputs of tree building, and `TreeBatch`, the trees of some layers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.errors import ConfigError
from gracekv.kernels.ragged import rows_and_steps
from gracekv.prefill import Prefill
from gracekv.segment.base import Partition
from gracekv.tree.merge import PrototypeRule
from gracekv.tree.nodes import Nodes


@dataclass(frozen=True, slots=True, eq=False)
class TreeContext:
    """The inputs of one forest.

    Attributes:
        prefill: one sequence.
        partition: J slots over the N compressible tokens.
        scores: R^tok [L, G, N] float32.
        seed_scores: S-hat [N] float32.
        sensitivity: omega [L, G] float32.
        rule: how tokens merge.
        forced: floor score [L, G, N] float64 of tokens that must be extracted first, -inf
            elsewhere; None: no floor.
        curvature: kappa [T], or None if no strategy needs it.
    """

    prefill: Prefill
    partition: Partition
    scores: Tensor
    seed_scores: Tensor
    sensitivity: Tensor
    rule: PrototypeRule
    forced: Tensor | None = None
    curvature: Tensor | None = None

    def layer_groups(self, limit: int) -> list[list[int]]:
        """Layers of one device whose gathered tokens take about `limit` bytes, a list a group.

        Those with RoPE and those without are in groups of their own.

        A group takes every k-th layer of its device, so that all groups resemble one another.
        """
        prefill = self.prefill
        # Per token of a head: key, value, about 64 probes' exponentials, and 8 other numbers.
        layer_bytes = (
            prefill.kv_heads * self.partition.region.length * (2 * prefill.head_dim + 72) * 4
        )
        alike: dict[tuple[torch.device, bool], list[int]] = defaultdict(list)
        for layer, keys in enumerate(prefill.keys):
            alike[keys.device, layer in prefill.unrotated].append(layer)
        groups = []
        for layers in alike.values():
            count = math.ceil(len(layers) / max(1, limit // layer_bytes))
            groups += [layers[k::count] for k in range(count)]
        return groups


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """The B = U*J trees of some layers of one device: U KV heads with J slots each.

    Tree b of the batch belongs to head b // J and slot b % J; U runs over the G KV heads of each
    layer.

    Attributes:
        context: the inputs of the forest.
        layers: whose trees.
        tree_id: int64 [B], index of each tree in the forest.
        slot_start: int64 [B], absolute first position of each tree's slot.
        length: int64 [B], tokens of each slot.
        curvature: kappa [T] float64, or None.
        forced: floor score [U, N] float64 (-inf: no candidate), or None.
        scores: R^tok [U, N] float64.
        sensitivity: omega [U] float64.
        region_start: absolute position of the first compressible token.
        candidate_count: int64 [U, N+1], floor candidates before each token, or None.
    """

    context: TreeContext
    layers: tuple[int, ...]
    tree_id: Tensor
    slot_start: Tensor
    length: Tensor
    curvature: Tensor | None
    forced: Tensor | None
    scores: Tensor
    sensitivity: Tensor
    region_start: int
    candidate_count: Tensor | None

    @classmethod
    def of(cls, context: TreeContext, layers: Sequence[int]) -> TreeBatch:
        """All trees of `layers`, on the layers' device."""
        device = context.prefill.keys[layers[0]].device
        partition, chosen = context.partition, list(layers)
        heads = len(chosen) * context.prefill.kv_heads
        forced, candidate_count = context.forced, None
        if forced is not None:
            forced = forced[chosen].flatten(0, 1).to(device)
            is_candidate = (forced > -torch.inf).long()
            candidate_count = torch.nn.functional.pad(is_candidate.cumsum(dim=1), (1, 0))
        # Trees of a forest are numbered (layer * G + head) * J + slot.
        per_layer = context.prefill.kv_heads * partition.slots
        first = torch.tensor(chosen, device=device)[:, None] * per_layer
        return cls(
            context=context,
            layers=tuple(chosen),
            tree_id=(first + torch.arange(per_layer, device=device)).flatten(),
            slot_start=partition.bounds[:-1].to(device).repeat(heads),
            length=partition.lengths.to(device).repeat(heads),
            curvature=None if context.curvature is None else context.curvature.to(device).double(),
            forced=forced,
            scores=context.scores[chosen].flatten(0, 1).to(device).double(),
            sensitivity=context.sensitivity[chosen].flatten().to(device).double(),
            region_start=partition.region.start,
            candidate_count=candidate_count,
        )

    def roots(self) -> Nodes:
        """The B roots."""
        tree = torch.arange(len(self.tree_id), device=self.tree_id.device)
        return Nodes(tree, torch.zeros_like(tree), self.length)

    def head(self, tree: Tensor) -> Tensor:
        """int64 [n]: row of the head of each tree [n] in `forced`, `scores` and `sensitivity`."""
        return tree // (len(self.tree_id) // len(self.scores))

    def offset(self, nodes: Nodes) -> Tensor:
        """int64 [V]: place of each node's first token in the region."""
        return self.slot_start[nodes.tree] - self.region_start + nodes.start

    def token_offsets(self, nodes: Nodes, width: int) -> Tensor:
        """int64 [V, width]: place of each token in the region; padding repeats the last token."""
        step = torch.arange(width, device=nodes.tree.device)
        return self.offset(nodes)[:, None] + torch.minimum(step, nodes.length[:, None] - 1)

    def known_curvature(self) -> Tensor:
        """kappa [T] float64; raises `ConfigError` if none was computed."""
        if self.curvature is None:
            raise ConfigError(
                "This refiner cuts at curvature peaks, but none was computed. Set candidates=0 and "
                "reward=0, or give the trees a curvature."
            )
        return self.curvature

    def curvatures(self, nodes: Nodes, width: int) -> Tensor:
        """kappa [V, width] float64 of the nodes' tokens; `ConfigError` if none was computed."""
        return self.known_curvature()[self.region_start + self.token_offsets(nodes, width)]

    def floor_scores(self, nodes: Nodes, width: int) -> Tensor | None:
        """Floor scores [V, width] float64 of the nodes' tokens; None without a floor."""
        if self.forced is None:
            return None
        return self.forced[self.head(nodes.tree)[:, None], self.token_offsets(nodes, width)]

    def holds_candidate(self, nodes: Nodes) -> Tensor:
        """bool [V]: nodes with a floor candidate inside."""
        if self.candidate_count is None:
            return torch.zeros_like(nodes.tree, dtype=torch.bool)
        head, offset = self.head(nodes.tree), self.offset(nodes)
        count = self.candidate_count
        return count[head, offset + nodes.length] > count[head, offset]

    def relevance(self, nodes: Nodes) -> Tensor:
        """R of the nodes, float64 [V]: the sum of their tokens' scores, in order.

        Not a difference of running sums, so that a small node next to a token of large score keeps
        its digits. Source: Eq. (V6).
        """
        count = nodes.length
        node, step = rows_and_steps(count)
        scores = self.scores[self.head(nodes.tree)[node], self.offset(nodes)[node] + step]
        return torch.segment_reduce(scores, "sum", lengths=count, unsafe=True)

    def weighted(self, tree: Tensor, relevance: Tensor) -> Tensor:
        """omega R float64 [V] of nodes of these trees, int64 [V], with R [V]."""
        return self.sensitivity[self.head(tree)] * relevance
