"""Scratch tensors that outlive a batch.

Fresh memory costs a CPU more to touch than the arithmetic done in it; the same buffers serve all
batches of a layer instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Named float32 buffers on one device, grown on demand; their contents are undefined."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """The buffer `name` as a contiguous tensor of this shape; it ends the last one's life."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.float32, device=self._device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)
