"""`Splitter`: into which children nodes split, and the distortion of the children."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gracekv.tree.nodes import Nodes


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The children of some nodes, in the nodes' order, each node's by start.

    Attributes:
        count: int64 [V].
        start: int64 [sum(count)] relative to the slot.
        end: int64 [sum(count)].
        distortion: D float64 [sum(count)].
    """

    count: Tensor
    start: Tensor
    end: Tensor
    distortion: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RootCosts:
    """The costs of the roots, computed before it is decided which of them split.

    Attributes:
        distortion: D float64 [B].
        drop: D^drop float64 [B].
        split: the `Split` of the roots in a mask, bool [B], of two tokens or more each.
    """

    distortion: Tensor
    drop: Tensor
    split: Callable[[Tensor], Split]


class Splitter(abc.ABC):
    """Splits the nodes of some layers; deterministic, and each node on its own."""

    @abc.abstractmethod
    def roots(self, nodes: Nodes) -> RootCosts:
        """The costs of all B >= 1 roots; called before any other node is split."""

    @abc.abstractmethod
    def __call__(self, nodes: Nodes, distortion: Tensor) -> Split:
        """The children of V >= 0 nodes below the roots, of two tokens or more, whose D float64 [V]
        is known."""
