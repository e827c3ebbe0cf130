"""`Forest`: all candidate nodes of all trees as flat arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gracekv.distributed.sharding import WHOLE, HeadShard


@dataclass(frozen=True, eq=False)
class Forest:
    """Every node of every (layer, KV head, slot) tree; V nodes, R trees, no object per node.

    Tree index: (layer * G + head) * J + slot. Nodes are sorted by level, then tree, then start;
    so node r < R is the root of tree r, levels are contiguous, and the children of a node are
    contiguous and ordered by start, in the order of their parents. All tensors on one device.

    The auction executes operations. Add(r) puts root r on the frontier of its empty tree, Split(v)
    replaces v by its children. An operation's cost is the number of physical entries that it adds
    (Eq. (A6)).

    Attributes:
        heads: G.
        slots: J.
        layers: L.
        start: int64 [V] absolute, inclusive.
        end: int64 [V] absolute, exclusive.
        parent: int64 [V], -1 for roots.
        first_child: int64 [V], -1 for leaves.
        child_count: int64 [V], 0 for leaves.
        tree: int64 [V].
        level: int64 [V], 0 for roots.
        relevance: R_{l,g}(v) float64 [V], Eq. (V6).
        distortion: D(I_v) float64 [V], Eq. (T7).
        drop: D^drop(I_r) float64 [R] of the roots.
        entries: int64 [V], physical entries of the node when it is on the frontier: 1 for a
            prototype or singleton; its token count for a node kept as its original tokens.
        add_gain: float64 [R], Delta_add, Eq. (A5) (not clipped).
        split_gain: float64 [V], Delta_split (not clipped); 0 for leaves.
        shard: the process's part of all KV heads; G counts this part. By default all heads.
    """

    layers: int
    heads: int
    slots: int
    start: Tensor
    end: Tensor
    parent: Tensor
    first_child: Tensor
    child_count: Tensor
    tree: Tensor
    level: Tensor
    relevance: Tensor
    distortion: Tensor
    drop: Tensor
    entries: Tensor
    add_gain: Tensor
    split_gain: Tensor
    shard: HeadShard = WHOLE

    @property
    def nodes(self) -> int:
        """V."""
        return len(self.start)

    @property
    def trees(self) -> int:
        """R = L * G * J."""
        return self.layers * self.heads * self.slots

    @cached_property
    def region(self) -> tuple[int, int]:
        """The first compressible position, and the one after the last."""
        # The roots of the first head cover it.
        first, last = torch.stack([self.start[0], self.end[self.slots - 1]]).tolist()
        return first, last

    @property
    def length(self) -> Tensor:
        """int64 [V], tokens under each node."""
        return self.end - self.start

    @property
    def is_leaf(self) -> Tensor:
        """bool [V]."""
        return self.child_count == 0

    def head_of_node(self) -> Tensor:
        """int64 [V]: layer * G + head of each node."""
        return self.tree // self.slots
