"""`Workspace`: scratch memory that is reused by successive batches.

The first write to a fresh page costs a CPU more than the arithmetic on it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """One float32 buffer on one device; each batch takes its tensors from it and overwrites it.

    Args:
        device: where the buffer lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.float32, device=device)
        self._taken = 0
        self._persistent: Workspace | None = None

    @property
    def persistent(self) -> Workspace:
        """A second buffer for tensors that are kept over batches; reused by groups of layers."""
        if self._persistent is None:
            self._persistent = Workspace(self._device)
        return self._persistent

    def reserve(self, numbers: int) -> None:
        """Begin a batch that takes at most `numbers` in all; tensors taken before are void."""
        if self._buffer.numel() < numbers:
            # The old buffer goes first, because both at once need not fit.
            self._buffer = self._buffer[:0].clone()
            self._buffer = torch.empty(numbers, dtype=torch.float32, device=self._device)
        self._taken = 0

    def take(self, *shape: int) -> Tensor:
        """The next contiguous tensor [*shape], float32; its contents are undefined."""
        first = self._taken
        self._taken += math.prod(shape)
        if self._taken > self._buffer.numel():
            raise MemoryError(
                f"The batch reserved {self._buffer.numel()} numbers and takes {self._taken}."
            )
        return self._buffer[first : self._taken].view(shape)


_CPU_BYTES = 3 * 2**24
_MAX_GPU_BYTES = 2**30


def scratch_bytes(device: torch.device) -> int:
    """A default limit of working memory: 48 MiB on a CPU; on a GPU an eighth of what is free.

    More does not help a CPU, whose cache is small; a GPU wants large batches, of 1 GiB at most.
    Memory that torch's allocator has reserved and does not use counts as free. Source: ours.
    """
    if device.type != "cuda":
        return _CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(min(_MAX_GPU_BYTES, max(_CPU_BYTES, free // 8)))
