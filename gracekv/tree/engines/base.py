"""The inputs of the engines that compute the prototype's distortion, and their choice."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from gracekv.errors import BackendUnavailableError
from gracekv.kernels.device import obstacle
from gracekv.kernels.rope import Rope
from gracekv.tree.probes import ProbeAttention
from gracekv.tree.tree_batch import TreeBatch

Engine = Literal["auto", "numba", "torch", "triton"]

LARGEST_DIM = 256
"""Largest head dimension that the engine `triton` takes."""

MAX_EXPONENT = 20.0
"""Largest log of Z~. A merged key can score higher than each of its tokens. Beyond e^20 times the
probe's largest exponential the distortion is huge anyway, and its square over epsilon must stay
finite in float32."""


# Fields of `ProbeAttention`.
_READ = (
    "exponentials", "unrotated_keys", "key_norms", "values", "scores", "queries", "max_logit",
    "inverse_sum", "visible_probes", "first_probe",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class EngineInputs:
    """The inputs of an engine, for the heads of some layers.

    Attributes:
        lambda_z: weight of the partition error.
        lambda_m: weight of the value-aggregate error.
        epsilon: guards both denominators.
        attention: the probes' attention to these heads.
        batch: the trees of these heads.
        rope: the rotations of all positions, in halves.
    """

    lambda_z: float
    lambda_m: float
    epsilon: float
    attention: ProbeAttention
    batch: TreeBatch
    rope: Rope

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of `attention` that kernels read, by name; and cos and sin [T, d_rot]."""
        held = self.attention
        rotations = {"cos": self.rope.cos, "sin": self.rope.sin}
        kept = {name: getattr(held, name) for name in _READ}
        # A sharded model's table lies on the device of its first layer.
        return kept | {name: x.to(held.values.device) for name, x in rotations.items()}

    def numbers(self) -> dict[str, Any]:
        """The numbers that kernels read of region, distortion and rule, by name."""
        rule = self.batch.context.rule
        return {
            **{name: float(getattr(self, name)) for name in ("lambda_z", "lambda_m", "epsilon")},
            "tokens": len(self.attention.visible_probes),
            "region_start": self.batch.region_start,
            "uniform_base": float(rule.uniform_base),
            "rule_epsilon": float(rule.epsilon),
        }


_FASTEST: Mapping[str, Engine] = {"cpu": "numba", "cuda": "triton"}


def select_engine(engine: Engine, values: Tensor, softcap: float | None = None) -> Engine:
    """The engine for a cache with these values [..., d] and this cap of logits; never "auto".

    "auto" takes the fastest that can run there: "numba" on CPUs, "triton" on GPUs, "torch" where
    neither is available. Raises `BackendUnavailableError` if `engine` names one that cannot run.
    """
    chosen = _FASTEST.get(values.device.type, "torch") if engine == "auto" else engine
    reason = None if chosen == "torch" else _obstacle(chosen, values, softcap)
    if reason is not None and engine != "auto":
        raise BackendUnavailableError(f"The distortion's engine {engine!r} cannot run. {reason}")
    return chosen if reason is None else "torch"


def _obstacle(engine: Engine, values: Tensor, softcap: float | None) -> str | None:
    """The reason why a compiled engine cannot run, and a remedy; None if it can."""
    dim, kind = values.shape[-1], type(values)
    if softcap is not None:
        return f"It does not cap logits, as this model does at {softcap:g}. Use engine 'torch'."
    # Kernels read memory, which a tensor subclass (traced, sharded ...) need not have.
    if kind is not Tensor:
        return f"It reads plain tensors; the cache is of type {kind.__name__}. Use engine 'torch'."
    if engine == "numba":
        if values.device.type == "cpu" and importlib.util.find_spec("numba") is not None:
            return None
        return (
            f"It needs a cache on a CPU, and numba; the cache lies on {values.device}. pip install "
            f'"gracekv[cpu]", or use engine "torch".'
        )
    if dim > LARGEST_DIM:
        return f"It reads heads of dimension {LARGEST_DIM} or less; got {dim}. Use engine 'torch'."
    return obstacle(values.device, "engine 'torch'")
