r"""`prototype`: attention-mass-weighted distortion, for all intervals of a slot at once.

For probe q and interval I of a slot, with p_t = exp(logit_t - max over the visible context):

    Z = sum_I p_t,  M = sum_I p_t v_t,  Z~ = m exp(q.k~ - max),  M~ = Z~ v~
    D_q = lambda_Z (Z - Z~)^2 / (Z^2 + eps) + lambda_M |M - M~|^2 / (|M|^2 + eps)
    D   = mean_q [ Z / Z_C  D_q ],   D^drop = mean_q Z / Z_C

over the probes at positions >= the interval's last token; Z_C is the probe's mass over its visible
part of the whole compressible context, so D is comparable everywhere. Source: the paper, Eqs.
app_original_attention_stats to app_node_and_drop_distortion; the table: departures 7.

Nothing here is a difference of long sums: Z and |M|^2 grow token by token, and M.v~ and the cross
terms of |M|^2 are matrix products with the Gram matrix of the slot's values, so M (d times larger)
is never formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from einops import rearrange, repeat
from torch import Tensor

from gracekv.errors import ConfigError
from gracekv.prefill import Needs
from gracekv.tree.context import SlotBatch, TreeContext, slot_batches
from gracekv.tree.distortion import DISTORTIONS, Distortion, TablePart, interval_list
from gracekv.tree.merge import representative_positions
from gracekv.tree.probes import distortion_probes, probe_queries
from gracekv.tree.workspace import Workspace

# A merged key can outscore every one of its tokens. Beyond e^20 times the probe's favourite the
# distortion is astronomical anyway, and its square over epsilon must stay finite in float32.
_MAX_EXPONENT = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class ProbedHeads:
    """Compressible tokens of U heads (some layers' KV heads) as their probes see them; P probes.

    Attributes:
        positions: int64 [P] ascending probe positions.
        queries: [U, P, d] float32, times the attention scale.
        top: [U, P] largest visible logit.
        exponentials: p [U, P, N]; 0 where the probe cannot see.
        inverse_total: 1 / Z_C [U, P].
        plain_keys: k^o [U, N, d].
        values: [U, N, d].
        worth: R^tok [U, N].
    """

    positions: Tensor
    queries: Tensor
    top: Tensor
    exponentials: Tensor
    inverse_total: Tensor
    plain_keys: Tensor
    values: Tensor
    worth: Tensor

    @classmethod
    def of(cls, context: TreeContext, layers: Sequence[int], probes: Tensor) -> ProbedHeads:
        """Gather some layers; probes that see none of the region are left out."""
        prefill, region = context.prefill, context.partition.region
        device = prefill.keys[layers[0]].device
        inside = slice(region.start, region.end)
        keys = torch.cat([prefill.keys[layer][:, inside] for layer in layers]).float()
        values = torch.cat([prefill.values[layer][:, inside] for layer in layers]).float()
        # Heads take turns over all probes; only then those that see no compressible token go.
        queries = torch.cat([probe_queries(prefill, layer, probes) for layer in layers])
        queries = queries[:, probes >= region.start] * prefill.scale
        probes = probes[probes >= region.start].to(device)
        at = torch.arange(region.start, region.end, device=device)
        logits = torch.bmm(queries, keys.mT)
        logits.masked_fill_(at > probes[:, None], -torch.inf)
        top = logits.amax(dim=-1)
        exponentials = logits.sub_(top[..., None]).exp_()
        return cls(
            positions=probes,
            queries=queries,
            top=top,
            exponentials=exponentials,
            inverse_total=1.0 / exponentials.sum(dim=-1),
            plain_keys=prefill.rope.unrotate(keys, at),
            values=values,
            worth=context.tokens[list(layers)].to(device).float().flatten(0, 1),
        )


@final
@DISTORTIONS.register("prototype")
@dataclass(frozen=True)
class Prototype(Distortion):
    """Attention-mass-weighted error of one prototype per interval (the paper's).

    Attributes:
        lambda_z: weight of the partition error, the paper's 0.25.
        lambda_m: weight of the value-aggregate error, the paper's 0.75.
        epsilon: guards both denominators (ours, 1e-12: exponentials are at most 1, and a token
            far below a probe's favourite has Z^2 of order 1e-12 legitimately).
        question_probes: probes from the question's end, the paper's 32.
        tail_probes: probes from the sequence's end, the paper's 16.
        evidence_slots: slots of largest evidence that lend probes, the paper's 8.
        evidence_per_slot: probes of each, the paper's 2.
        memory_limit: bytes of working tensors per batch; None: 32 MiB on a CPU, 1 GiB on a GPU
            (ours).
    """

    lambda_z: float = 0.25
    lambda_m: float = 0.75
    epsilon: float = 1e-12
    question_probes: int = 32
    tail_probes: int = 16
    evidence_slots: int = 8
    evidence_per_slot: int = 2
    memory_limit: int | None = None

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

    def needs(self) -> Needs:
        return Needs(context_queries=self.evidence_slots * self.evidence_per_slot > 0)

    def parts(
        self, context: TreeContext, layers: Sequence[int], space: Workspace
    ) -> Iterator[TablePart]:
        probes = distortion_probes(
            context.prefill,
            context.partition,
            context.evidence,
            question=self.question_probes,
            tail=self.tail_probes,
            slots=self.evidence_slots,
            per_slot=self.evidence_per_slot,
        )
        probed = ProbedHeads.of(context, layers, probes)
        device = probed.values.device
        heads, _, dim = probed.queries.shape
        limit = self.memory_limit or (2**30 if device.type == "cuda" else 32 * 2**20)
        for batch in slot_batches(context.partition, device):
            # Four fields over (interval, probe), two over (interval, token), two keys an interval.
            intervals = batch.n * (batch.n + 1) // 2
            per_slot = heads * intervals * (4 * len(probed.positions) + 2 * batch.n + 2 * dim + 2)
            size = max(1, limit // (4 * per_slot))
            for first in range(0, len(batch.slots), size):
                chunk = batch.chunk(first, first + size)
                space.reserve(per_slot * len(chunk.slots))
                yield self._part(context, chunk, probed, space)

    def _part(
        self, context: TreeContext, batch: SlotBatch, probed: ProbedHeads, space: Workspace
    ) -> TablePart:
        origin, rule = context.partition.region.start, context.rule
        n, slots = batch.n, len(batch.slots)
        heads, _, dim = probed.values.shape
        items, device = heads * slots, probed.values.device
        offsets = batch.offsets(origin)
        # Probes are ascending, and one before a slot's first token sees nothing of it.
        at = slice(int((probed.positions < batch.starts.min()).sum()), None)
        positions = probed.positions[at]

        p = rearrange(
            probed.exponentials[:, at][:, :, offsets], "u p s n -> (u s) n p"
        ).contiguous()
        keys = probed.plain_keys[:, offsets].flatten(0, 1)
        values = probed.values[:, offsets].flatten(0, 1)
        worth = probed.worth[:, offsets].flatten(0, 1)

        first, last = interval_list(n, device)
        intervals, probes = len(first), p.shape[-1]
        token = torch.arange(n, device=device)
        inside = ((token >= first[:, None]) & (token <= last[:, None])).float()
        count = (last - first + 1).float()
        average = inside / count[:, None]

        # Z~ = exp(scale q.k~ + log m - max): the two last terms ride as extra features.
        mean_key = space.take(items, intervals, dim)
        torch.bmm(average.expand(items, -1, -1), keys, out=mean_key)
        multiplicity = rule.multiplicities(
            mean_key.norm(dim=-1), keys.norm(dim=-1) @ average.T, count
        )
        where = representative_positions(
            batch.starts[:, None] + first, batch.starts[:, None] + last + 1
        )
        features = space.take(items, intervals, dim + 2)
        context.prefill.rope.rotate(
            mean_key.unflatten(0, (heads, slots)),
            where,
            out=features[..., :dim].unflatten(0, (heads, slots)),
        )
        features[..., dim], features[..., dim + 1] = multiplicity.log(), 1.0
        probe_features = torch.cat(
            [probed.queries, torch.ones_like(probed.top)[..., None], -probed.top[..., None]], -1
        )[:, at]
        probe_features = repeat(probe_features, "u p f -> (u s) f p", s=slots)
        z_tilde = space.take(items, intervals, probes)
        torch.bmm(features, probe_features, out=z_tilde).clamp_(max=_MAX_EXPONENT).exp_()

        # v~ = V^T w with normalised weights w; M.v~ = sum_t p_t (Gram w)_t.
        gram = torch.bmm(values, values.mT)
        base = rule.uniform_base * (worth @ average.T)
        weight = space.take(items, intervals, n)
        torch.add(worth[:, None, :], base[..., None], out=weight).mul_(inside)
        total = weight.sum(dim=-1, keepdim=True)
        weight.div_(total + rule.epsilon)
        torch.where(total > 0, weight, average, out=weight)
        projected = space.take(items, intervals, n)
        torch.bmm(weight, gram, out=projected)
        v_square = weight.mul_(projected).sum(dim=-1)
        m_dot_v = space.take(items, intervals, probes)
        torch.bmm(projected.mul_(inside), p, out=m_dot_v)

        # |M|^2 and Z of [i, j] from [i, j-1], plus what token j adds.
        before = weight
        torch.index_select(gram, 1, last, out=before)
        before.mul_(inside * (token < last[:, None]))
        z = space.take(items, intervals, probes)
        torch.index_select(p, 1, last, out=z)
        m_square = space.take(items, intervals, probes)
        torch.bmm(before, p, out=m_square).mul_(2.0)
        m_square.addcmul_(z, gram.diagonal(dim1=1, dim2=2)[:, last, None]).mul_(z)
        for j in range(1, n):
            now, past = j * (j + 1) // 2, (j - 1) * j // 2
            z[:, now : now + j].add_(z[:, past:now])
            m_square[:, now : now + j].add_(m_square[:, past:now])

        error = m_dot_v.mul_(-2.0).addcmul_(z_tilde, v_square[..., None]).mul_(z_tilde)
        error.add_(m_square).clamp_(min=0.0).mul_(self.lambda_m)
        error.div_(m_square.clamp_(min=0.0).add_(self.epsilon))
        z_error = z_tilde.sub_(z).square_().mul_(self.lambda_z)
        z_square = torch.mul(z, z, out=m_square)
        error.add_(z_error.div_(z_square.add_(self.epsilon))).mul_(z)

        # Mean over the probes that see token j, each mass normalised by its total.
        sees = (positions >= batch.starts[:, None, None] + token[:, None]).float()
        sees = repeat(sees / sees.sum(dim=-1, keepdim=True), "s n p -> (u s) n p", u=heads)
        share = sees * repeat(probed.inverse_total[:, at], "u p -> (u s) 1 p", s=slots)
        error.mul_(torch.index_select(share, 1, last, out=z))
        distortion = error.sum(dim=-1)
        distortion[:, first == last] = 0.0
        mass = torch.bmm(share, p.mT)

        return TablePart(
            batch=batch,
            distortion=distortion,
            drop=mass[:, -1].sum(dim=-1),
            mass=mass,
        )
