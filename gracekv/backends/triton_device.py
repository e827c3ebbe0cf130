"""What the decode kernels need to know about the device that they run on."""

from __future__ import annotations

import torch

from gracekv.kernels import device as host
from gracekv.kernels.device import capability, interpreted

__all__ = ["capability", "interpreted", "obstacle", "processors"]

# Processors that Triton's interpreter pretends to have (ours).
_INTERPRETED_PROCESSORS = 4


def obstacle(device: torch.device) -> str | None:
    """Why the kernels cannot run on `device` and what to do about it; None if they can."""
    return host.obstacle(device, "backend 'sdpa'")


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
