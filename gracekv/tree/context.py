"""`TreeContext`: the inputs of tree building."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.prefill import Prefill
from gracekv.segment.base import Partition
from gracekv.tree.merge import PrototypeRule


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
