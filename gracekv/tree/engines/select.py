"""Which engine computes the prototype's distortion, by the device of the cache."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from gracekv.errors import BackendUnavailableError
from gracekv.kernels.device import obstacle
from gracekv.tree.engines.base import Engine
from gracekv.tree.engines.triton_blocks import LARGEST_DIM


def select_engine(engine: Engine, values: Tensor, softcap: float | None = None) -> Engine:
    """The engine for a cache with these values [..., d] and this cap of logits; never "auto".

    "auto" takes the fastest that can run there: "numba" on CPUs, "triton" on GPUs, "torch" where
    neither is available. Raises `BackendUnavailableError` if `engine` names one that cannot run.
    """
    if softcap is not None:
        if engine in ("numba", "triton"):
            raise BackendUnavailableError(
                f"The distortion's engine {engine!r} does not cap logits, as this model does at "
                f"{softcap:g}. Choose engine='torch' or 'auto'."
            )
        return "torch"
    device = values.device
    # Kernels read memory, which a tensor subclass (traced, sharded ...) need not have.
    plain = type(values) is Tensor
    if engine in ("auto", "numba"):
        if plain and device.type == "cpu" and importlib.util.find_spec("numba") is not None:
            return "numba"
        if engine == "numba":
            raise BackendUnavailableError(
                f"The distortion's engine 'numba' needs a cache on a CPU, and numba; the cache "
                f'lies on {device}. pip install "gracekv[cpu]", or choose engine="torch".'
            )
    if engine == "triton" or (engine == "auto" and device.type == "cuda"):
        reason = _triton_obstacle(values)
        if reason is None:
            return "triton"
        if engine == "triton":
            raise BackendUnavailableError(f"The distortion's engine 'triton' cannot run. {reason}")
    return "torch"


def _triton_obstacle(values: Tensor) -> str | None:
    dim, kind = values.shape[-1], type(values)
    if kind is not Tensor:
        return f"It reads plain tensors; the cache is of type {kind.__name__}. Use engine 'torch'."
    if dim > LARGEST_DIM:
        return f"It reads heads of dimension {LARGEST_DIM} or less; got {dim}. Use engine 'torch'."
    return obstacle(values.device, "engine 'torch'")
