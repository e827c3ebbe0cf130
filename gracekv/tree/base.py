"""`Nodes` of one level and their costs; `Forest`: all nodes of all trees as flat arrays."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gracekv.distributed.sharding import WHOLE, HeadShard


@dataclass(frozen=True, eq=False)
class Nodes:
    """V nodes of the trees of a `TreeBatch`, ordered by tree and start.

    Attributes:
        tree: int64 [V], index of the tree in the batch.
        start: int64 [V], relative to the slot.
        end: int64 [V], exclusive.
        longest: tokens of the longest node; if None, `width` reads it from the device.
    """

    tree: Tensor
    start: Tensor
    end: Tensor
    longest: int | None = None

    def __len__(self) -> int:
        return len(self.tree)

    @cached_property
    def length(self) -> Tensor:
        """int64 [V], tokens."""
        return self.end - self.start

    @property
    def width(self) -> int:
        """Tokens of the longest node."""
        return int(self.length.max()) if self.longest is None else self.longest

    def __getitem__(self, rows: Tensor | slice) -> Nodes:
        """The nodes at `rows` (indices, a mask or a slice), in that order."""
        return Nodes(self.tree[rows], self.start[rows], self.end[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """The children of some nodes, in the order of the nodes, then by start.

    Attributes:
        count: int64 [V], children of each node: at least 2, or 0 to leave the node a leaf.
        start: int64 [sum(count)], relative to the slot.
        end: int64 [sum(count)], exclusive.
    """

    count: Tensor
    start: Tensor
    end: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class IntervalCosts:
    """D of the prefixes and suffixes of V nodes of up to w tokens.

    Refiners need no other intervals: all parts of a cut or an extraction start or end where their
    node does. Columns beyond a node's length are undefined.

    Attributes:
        costs: float32 [2, V, w]: D of the node's tokens up to and including k, and D of its tokens
            from k on.
        mass: float32 [V, w]: mean normalised attention to token k from the probes that see the
            whole node.
        drop: D^drop float32 [V] of the whole node.
    """

    costs: Tensor
    mass: Tensor
    drop: Tensor

    @property
    def prefix(self) -> Tensor:
        """[V, w]: D of the tokens up to and including k."""
        return self.costs[0]

    @property
    def suffix(self) -> Tensor:
        """[V, w]: D of the tokens from k on."""
        return self.costs[1]

    def __getitem__(self, rows: Tensor) -> IntervalCosts:
        """The costs of the nodes at `rows`, in that order."""
        return IntervalCosts(self.costs[:, rows], self.mass[rows], self.drop[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The children of V nodes and their distortion, in up to m places per node.

    Its shape does not depend on data, so no synchronisation is needed.

    Attributes:
        start: int64 [V, m], relative to the slot; non-decreasing along a row.
        end: int64 [V, m], exclusive; places with start == end have no child.
        distortion: D float64 [V, m]; 0 in places without a child.
    """

    start: Tensor
    end: Tensor
    distortion: Tensor

    @classmethod
    def of_cuts(cls, nodes: Nodes, low: Tensor, high: Tensor, outer: Tensor) -> Split:
        """Cut nodes at `low` and `high`, int64 [V] relative to their starts.

        `outer` is D float64 [V, 2] of the parts before `low` and from `high` on. The part in
        between is empty or a single token.
        """
        bounds = torch.stack([nodes.start, nodes.start + low, nodes.start + high, nodes.end], dim=1)
        distortion = outer.new_zeros(len(outer), 3)
        distortion[:, ::2] = outer
        return cls(bounds[:, :3], bounds[:, 1:], distortion)


@dataclass(frozen=True, slots=True, eq=False)
class RootCosts:
    """The costs of the roots, computed before it is known which of them split.

    Attributes:
        distortion: D float64 [B].
        drop: D^drop float64 [B].
        split: returns the `Split` of the roots at indices int64 [V], each of two tokens or more,
            given a mask bool [V] of those that must extract a floor candidate.
    """

    distortion: Tensor
    drop: Tensor
    split: Callable[[Tensor, Tensor], Split]


class Splitter(abc.ABC):
    """Splits the nodes of some layers, deterministically and independently."""

    @abc.abstractmethod
    def roots(self, nodes: Nodes) -> RootCosts:
        """The costs of all B >= 1 roots; called before any node is split."""

    @abc.abstractmethod
    def __call__(self, nodes: Nodes, distortion: Tensor, forced: Tensor) -> Split:
        """The children of V >= 1 nodes of two tokens or more below the roots.

        Args:
            nodes: the nodes.
            distortion: their D, float64 [V].
            forced: bool [V], nodes that hold a floor candidate.
        """


@dataclass(frozen=True, eq=False)
class Forest:
    """Every node of every (layer, KV head, slot) tree: V nodes, R trees, no object per node.

    Tree index: (layer * G + head) * J + slot. Nodes are sorted by level, then tree, then start. So
    node r < R is the root of tree r, levels are contiguous, and the children of a node are
    contiguous and ordered by start, in the order of their parents. All tensors are on one device.

    The auction executes operations. Add(r) puts root r on the frontier of its empty tree, Split(v)
    replaces v with its children. An operation's cost is the number of physical entries that it adds
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
        entries: int64 [V], physical entries of the node if it is on the frontier: 1 for a prototype
            or singleton; its token count for a node kept as its original tokens.
        add_gain: float64 [R], Delta_add, Eq. (A5) (not clipped).
        split_gain: float64 [V], Delta_split (not clipped); 0 for leaves.
        shard: this process's KV heads, which G counts; by default all.
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
        """The first compressible position and one past the last."""
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
