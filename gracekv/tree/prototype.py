r"""`prototype`: attention-mass-weighted distortion of the ends of nodes.

For probe q and interval I, with p_t = exp(logit_t - max over the visible context):

    Z = sum_I p_t,  M = sum_I p_t v_t,  Z~ = m exp(q.k~ - max),  M~ = Z~ v~
    D_q = lambda_Z (Z - Z~)^2 / (Z^2 + eps) + lambda_M |M - M~|^2 / (|M|^2 + eps)
    D   = mean_q [ Z / Z_C  D_q ],   D^drop = mean_q Z / Z_C

over the probes at positions >= the interval's last token; Z_C is the probe's mass over its visible
part of the whole compressible context, so D is comparable everywhere.
Source: Eqs. (T5) to (T7); all ends of a node at once: departures 7 (ours).

Engines: `gracekv.tree.prototype_torch`, `prototype_numba` and `prototype_triton` beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final, get_args

from gracekv.errors import ConfigError
from gracekv.prefill import Needs
from gracekv.tree.context import TreeContext
from gracekv.tree.distortion import DISTORTIONS, Distortion, DistortionEvaluator
from gracekv.tree.engines import Engine, pick
from gracekv.tree.items import Items
from gracekv.tree.probe_attention import ProbeAttention
from gracekv.tree.probes import distortion_probes
from gracekv.tree.prototype_numba import NumbaEvaluator
from gracekv.tree.prototype_torch import TorchEvaluator
from gracekv.tree.prototype_triton import TritonEvaluator
from gracekv.tree.workspace import Workspace


@final
@DISTORTIONS.register("prototype")
@dataclass(frozen=True)
class Prototype(Distortion):
    """Attention-mass-weighted error of one prototype per interval (the paper's).

    Source: Eqs. (T1) to (T7); departures 4. Ours:
    all ends of a node in one pass (departures 7), `epsilon`, and the cap of the merged mass.

    Cost: most of construction: O(P d) for each of the 2n ends of a judged node of n tokens, with P
    probes; about a tenth of a prefill on a CPU with the compiled engine.

    Attributes:
        lambda_z: weight of the partition error, the paper's 0.25.
        lambda_m: weight of the value-aggregate error, the paper's 0.75.
        epsilon: guards both denominators (ours, 1e-12: exponentials are at most 1, and a token
            far below a probe's favourite has Z^2 of order 1e-12 legitimately).
        question_probes: probes from the question's end, the paper's 32.
        tail_probes: probes from the sequence's end, the paper's 16.
        evidence_slots: slots of largest evidence that lend probes, the paper's 8.
        evidence_per_slot: probes of each, the paper's 2.
        memory_limit: bytes of working tensors per batch of "torch"; None: 32 MiB on a CPU, 1 GiB
            on a GPU (ours).
        engine: "numba" (a CPU kernel, needs `gracekv[cpu]`), "triton" (an NVIDIA kernel, needs
            `gracekv[triton]`), "torch" (any device), or "auto": a kernel where one can be had, else
            torch (ours). They agree to float32's rounding.

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    lambda_z: float = 0.25
    lambda_m: float = 0.75
    epsilon: float = 1e-12
    question_probes: int = 32
    tail_probes: int = 16
    evidence_slots: int = 8
    evidence_per_slot: int = 2
    memory_limit: int | None = None
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        counts = (self.question_probes, self.evidence_slots, self.evidence_per_slot)
        if min(counts) < 0 or self.tail_probes < 1:
            raise ConfigError(
                f"Prototype takes non-negative probe counts and tail_probes >= 1 (the last "
                f"position sees every interval); got {self!r}."
            )
        if min(self.lambda_z, self.lambda_m, self.epsilon) < 0:
            raise ConfigError(f"Prototype takes weights and epsilon >= 0; got {self!r}.")
        if self.memory_limit is not None and self.memory_limit < 2**20:
            raise ConfigError(
                f"memory_limit is in bytes and at least 1 MiB = {2**20}; got {self.memory_limit}."
            )
        if self.engine not in get_args(Engine):
            raise ConfigError(
                f"Prototype takes engine {', '.join(get_args(Engine))}; got {self.engine!r}."
            )

    def needs(self) -> Needs:
        return Needs(context_queries=self.evidence_slots * self.evidence_per_slot > 0)

    def evaluator(
        self, context: TreeContext, layers: Sequence[int], items: Items, space: Workspace
    ) -> DistortionEvaluator:
        probes = distortion_probes(
            context.prefill,
            context.partition,
            context.seed_scores,
            question=self.question_probes,
            tail=self.tail_probes,
            slots=self.evidence_slots,
            per_slot=self.evidence_per_slot,
        )
        probed = ProbeAttention.of(context, layers, probes, space)
        rope = context.prefill.rope
        engine = pick(self.engine, probed.values)
        if engine == "torch":
            return TorchEvaluator(self, probed, items, rope, context.rule, space)
        kernel = NumbaEvaluator if engine == "numba" else TritonEvaluator
        return kernel(self, probed, items, rope, context.rule)
