"""`EngineInputs`: what every engine computes the prototype's distortion from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gracekv.kernels.rope import Rope
from gracekv.tree.merge import PrototypeRule
from gracekv.tree.probe_attention import ProbeAttention
from gracekv.tree.tree_batch import TreeBatch

Engine = Literal["auto", "numba", "torch", "triton"]

MAX_EXPONENT = 20.0
"""Largest log of Z~. A merged key can score higher than each of its tokens. Beyond e^20 times the
probe's largest exponential the distortion is huge anyway, and its square over epsilon must stay
finite in float32."""


@dataclass(frozen=True, slots=True)
class DistortionWeights:
    """The weights of `Prototype`, as its engines read them.

    Attributes:
        lambda_z: weight of the partition error.
        lambda_m: weight of the value-aggregate error.
        epsilon: guards both denominators.
    """

    lambda_z: float
    lambda_m: float
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class EngineInputs:
    """The inputs of an engine, for the heads of some layers.

    Attributes:
        weights: of the distortion.
        attention: of the probes to these heads.
        batch: the trees of these heads.
        rope: the rotations of all positions, in halves.
        rule: how tokens merge.
        softcap: of the logits; None: none.
    """

    weights: DistortionWeights
    attention: ProbeAttention
    batch: TreeBatch
    rope: Rope
    rule: PrototypeRule
    softcap: float | None = None
