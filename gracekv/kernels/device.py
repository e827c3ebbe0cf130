"""Where Triton kernels can run, and the device properties that they need."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import warnings
from functools import cache

import torch


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter on the CPU (decided when it is imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; for Triton's interpreter that of the oldest supported (ours)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 for Triton's interpreter (ours)."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def obstacle(device: torch.device, otherwise: str) -> str | None:
    """The reason why the kernels cannot run on `device`, with a remedy, or None if they can.

    Args:
        device: the device of the tensors.
        otherwise: what to use instead, such as "backend 'sdpa'".
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed. Run: pip install 'gracekv[triton]' (Linux only)."
    if device.type == "cpu" and interpreted():
        return None
    if device.type != "cuda":
        return (
            f"The cache is on {device}; the kernels run on NVIDIA GPUs. Move the model there "
            f"before compressing, or use {otherwise}."
        )
    if torch.version.hip is not None:
        return f"The kernels only support NVIDIA GPUs. Use {otherwise}."
    if not torch.cuda.is_available():
        return f"torch sees no CUDA GPU. Install a CUDA build of torch, or use {otherwise}."
    if (version := capability(device)) < (8, 0):
        return (
            f"This GPU has compute capability {version[0]}.{version[1]}; the kernels need 8.0 or "
            f"newer. Use {otherwise}."
        )
    failure = _build_failure()
    return failure and f"{failure} Or use {otherwise}."


@cache
def _build_failure() -> str | None:
    """Why Triton cannot build its kernel launcher, with a remedy, or None; warns about it."""
    try:
        _ = importlib.import_module("triton.runtime").driver.active.utils
    except Exception as error:
        failed = isinstance(error, OSError | subprocess.SubprocessError)
        if not failed and "compiler" not in str(error):
            return None  # other problems are reported at the launch
        said = (
            f"Triton cannot build its kernel launcher ({type(error).__name__}: {error}). "
            f"Install a C compiler and Python's headers."
        )
        warnings.warn(f"{said} Until then, slower torch kernels are used.", stacklevel=2)
        return said
    return None
