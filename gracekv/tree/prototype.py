r"""`prototype`: attention-mass-weighted distortion of prototypes.

For probe q and interval I, with p_t = exp(logit_t - max over the visible context):

    Z = sum_I p_t,  M = sum_I p_t v_t,  Z~ = m exp(q.k~ - max),  M~ = Z~ v~
    D_q = lambda_Z (Z - Z~)^2 / (Z^2 + eps) + lambda_M |M - M~|^2 / (|M|^2 + eps)
    D   = mean_q [ Z / Z_C  D_q ],   D^drop = mean_q Z / Z_C

over the probes at positions >= the interval's last token; Z_C is the probe's mass over the visible
part of the whole compressible context, so D is comparable everywhere.
Source: Eqs. (T5) to (T7); all prefixes and suffixes of a node at once: departures 7 (ours).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.prefill import Needs
from gracekv.registry import bounded
from gracekv.tree.distortion import DISTORTIONS, Distortion, DistortionEvaluator
from gracekv.tree.engines.base import Engine, EngineInputs, ProbeAttention, select_engine
from gracekv.tree.engines.numba import NumbaEvaluator
from gracekv.tree.engines.torch import TorchEvaluator
from gracekv.tree.engines.triton import TritonEvaluator
from gracekv.tree.tree_batch import TreeBatch, TreeContext, Workspace


@DISTORTIONS.register("prototype", works_sharded=True)
class Prototype(Distortion):
    """Attention-mass-weighted error of one prototype per interval (the paper's).

    Source: Eqs. (T1) to (T7); departures 4. Ours: all prefixes and suffixes of a node in one pass
    (departures 7), `epsilon`, and the cap on the merged mass.

    Cost: most of construction: O(P d) for each of the 2n intervals of a node of n tokens, with P
    probes; about a tenth of a prefill on a CPU with the engine "numba".

    Attributes:
        lambda_z: weight of the partition error (the paper's 0.25).
        lambda_m: weight of the value-aggregate error (the paper's 0.75).
        epsilon: added to both denominators (ours, 1e-12: exponentials are at most 1, and a token
            with a logit far below a probe's maximum may have Z^2 of order 1e-12).
        question_probes: number of probes from the question's end (the paper's 32).
        tail_probes: number of probes from the sequence's end (the paper's 16).
        evidence_slots: number of slots of largest seed score with probes (the paper's 8).
        evidence_per_slot: number of probes of each (the paper's 2).
        memory_limit: bytes of working tensors per batch of "torch"; by default 32 MiB on a CPU, 1
            GiB on a GPU (ours).
        engine: "numba" (a CPU kernel, needs `gracekv[cpu]`), "triton" (an NVIDIA kernel, needs
            `gracekv[triton]`), "torch" (any device), or "auto": a kernel if one is available, else
            torch (ours). They agree up to float32 rounding.
    """

    lambda_z: float = bounded(0.25, at_least=0)
    lambda_m: float = bounded(0.75, at_least=0)
    epsilon: float = bounded(1e-12, at_least=1e-20, hint="It keeps denominators from 0.")
    question_probes: int = bounded(32, at_least=0)
    tail_probes: int = bounded(16, at_least=1, hint="The last position sees every interval.")
    evidence_slots: int = bounded(8, at_least=0)
    evidence_per_slot: int = bounded(2, at_least=0)
    memory_limit: int | None = bounded(None, at_least=2**20, hint="It is in bytes, 1 MiB or more.")
    engine: Engine = "auto"

    def needs(self) -> Needs:
        """Queries of the probes; those of evidence slots are chosen later."""
        return Needs(
            question_queries=self.question_probes,
            last_queries=self.tail_probes,
            later_queries=self.evidence_slots * self.evidence_per_slot > 0,
        )

    def probes(self, context: TreeContext) -> Tensor:
        """Absolute positions of the probes, int64 [P] ascending, on the CPU.

        Question and tail probes, and the tokens of largest S-hat in each of the slots of largest
        total S-hat; ties go to the earlier slot or token. Source: the paper, "Prototype distortion"
        (up to 32 + 16 + 2*8 probes); how representatives are chosen: departures 4 (ours).
        """
        partition, spans = context.partition, context.prefill.spans
        probes = set(spans.direct_probes(self.question_probes, self.tail_probes))
        if self.evidence_slots and self.evidence_per_slot:
            score, first = context.seed_scores.double().cpu(), int(partition.bounds[0])
            total = torch.segment_reduce(score, "sum", lengths=partition.lengths, unsafe=True)
            for slot in total.argsort(descending=True, stable=True)[: self.evidence_slots].tolist():
                a, b = partition.bounds[slot : slot + 2].tolist()
                best = score[a - first : b - first].argsort(descending=True, stable=True)
                probes.update((best[: self.evidence_per_slot] + a).tolist())
        return torch.tensor(sorted(probes), dtype=torch.int64)

    def evaluator(self, batch: TreeBatch, workspace: Workspace) -> DistortionEvaluator:
        prefill = batch.context.prefill
        inputs = EngineInputs(
            weights={x: float(getattr(self, x)) for x in ("lambda_z", "lambda_m", "epsilon")},
            attention=ProbeAttention(batch, self.probes(batch.context), workspace),
            batch=batch,
            rope=prefill.rope_of(batch.layers[0]).in_halves(prefill.head_dim)[0],
        )
        engine = select_engine(self.engine, inputs.attention.values, prefill.softcap)
        if engine == "torch":
            return TorchEvaluator(inputs, workspace, self.memory_limit)
        return NumbaEvaluator(inputs) if engine == "numba" else TritonEvaluator(inputs)
