"""Scratch memory that outlives a batch.

A fresh page costs a CPU more than the arithmetic done in it; so all batches share one arena.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """One float32 arena on one device; a batch takes its tensors from it, the next takes them over.

    Args:
        device: where it lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arena = torch.empty(0, dtype=torch.float32, device=device)
        self._taken = 0
        self._lasting: Workspace | None = None

    @property
    def lasting(self) -> Workspace:
        """A second arena, for what must outlive a batch: its batches are groups of layers."""
        if self._lasting is None:
            self._lasting = Workspace(self._device)
        return self._lasting

    def reserve(self, numbers: int) -> None:
        """Begin a batch that will take at most `numbers` in all; what was taken before is void."""
        if self._arena.numel() < numbers:
            # The old one goes first: both at once need not fit.
            self._arena = self._arena[:0].clone()
            self._arena = torch.empty(numbers, dtype=torch.float32, device=self._device)
        self._taken = 0

    def take(self, *shape: int) -> Tensor:
        """The next contiguous tensor [*shape], float32; its contents are undefined."""
        first = self._taken
        self._taken += math.prod(shape)
        if self._taken > self._arena.numel():
            raise MemoryError(
                f"The batch reserved {self._arena.numel()} numbers and takes {self._taken}."
            )
        return self._arena[first : self._taken].view(shape)
