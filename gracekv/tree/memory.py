"""The default limit of a stage's scratch memory."""

from __future__ import annotations

import torch

_CPU_BYTES = 3 * 2**24
_MAX_GPU_BYTES = 2**30


def scratch_bytes(device: torch.device) -> int:
    """A default limit of working memory: 48 MiB on a CPU; on a GPU an eighth of what is free.

    More helps a CPU little, whose cache is small; a GPU wants large batches, 1 GiB at most. Free is
    also what torch's allocator has reserved and does not use. Source: ours.
    """
    if device.type != "cuda":
        return _CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(min(_MAX_GPU_BYTES, max(_CPU_BYTES, free // 8)))
