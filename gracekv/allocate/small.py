"""What the exact allocators share: the open operations of a small forest, in pre-order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gracekv.allocate.operations import Operations
from gracekv.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class SmallProblem:
    """The n operations that may still be bought, parents before children, heads one by one.

    Attributes:
        index: int64 [n], which operations they are.
        parent: int64 [n], place of the operation that must come first; -1 if it is done already.
        gain: float64 [n], clipped at 0.
        cost: int64 [n].
        head: int64 [n].
    """

    index: Tensor
    parent: np.ndarray
    gain: np.ndarray
    cost: np.ndarray
    head: np.ndarray

    @classmethod
    def of(
        cls, ops: Operations, executed: Tensor, *, elastic: bool, most: int, solver: str
    ) -> SmallProblem:
        """The problem that `executed` (bool [M]) leaves.

        Elastic leaves out what lies at or behind an operation of gain 0. Raises `ConfigError`
        beyond `most` operations.
        """
        wanted = ~executed
        if elastic:
            wanted &= ops.bottleneck(executed) > 0
        index = wanted.nonzero().flatten()
        if len(index) > most:
            raise ConfigError(
                f"{solver} solves at most max_operations = {most} operations; this forest leaves "
                f"{len(index)}. Raise max_operations if you can wait, or use 'greedy' or "
                f"'lagrangian', whose bound tells how far from optimal they are."
            )
        index = index[torch.argsort(ops.sequence(index))] if len(index) else index
        place = torch.full((len(ops) + 1,), -1, device=index.device)
        place[index] = torch.arange(len(index), device=index.device)
        # Operation -1 (none) reads the extra last place.
        parent = place[ops.parent[index]]
        return cls(
            index=index,
            parent=parent.cpu().numpy(),
            gain=ops.gain[index].cpu().numpy(),
            cost=ops.cost[index].cpu().numpy(),
            head=ops.head(index).cpu().numpy(),
        )

    def chosen(self, executed: Tensor, take: np.ndarray) -> Tensor:
        """bool [M]: `executed` and the operations where `take` (bool [n]) holds."""
        result = executed.clone()
        result[self.index[torch.from_numpy(take).to(self.index.device)]] = True
        return result
