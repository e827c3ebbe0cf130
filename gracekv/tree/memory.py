"""How much scratch memory a stage may take when nobody says."""

from __future__ import annotations

import torch

_CPU = 3 * 2**24
_GPU_MOST = 2**30


def scratch_bytes(device: torch.device) -> int:
    """A default limit of working memory: 48 MiB on a CPU; on a GPU an eighth of what is free.

    More helps a CPU little, whose cache is small; a GPU wants large batches, 1 GiB at most.
    Source: ours.
    """
    if device.type != "cuda":
        return _CPU
    free, _ = torch.cuda.mem_get_info(device)
    return int(min(_GPU_MOST, max(_CPU, free // 8)))
