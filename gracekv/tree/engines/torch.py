"""The engine `torch`: running sums over tokens, for any device.

A node is read twice, forwards for its prefixes and backwards for its suffixes; a sequence below is
one such pass, R = 2V in total. There are no differences of long sums: Z, |M|^2 and the mean key
grow token by token, and M.v~ and the cross terms of |M|^2 are products with the Gram matrix of the
node's values, so M (d times larger) is never formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.kernels.linalg import capped, linear, running_sums
from gracekv.tree.base import IntervalCosts, Nodes
from gracekv.tree.distortion import DistortionEvaluator
from gracekv.tree.engines.base import MAX_EXPONENT, EngineInputs
from gracekv.tree.merge import representative_positions
from gracekv.tree.tree_batch import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class TorchEvaluator(DistortionEvaluator):
    """D of nodes in the heads of some layers.

    Attributes:
        inputs: the inputs of the engine.
        workspace: scratch memory.
        memory_limit: bytes of working tensors per batch of nodes; by default 32 MiB on a CPU, 1 GiB
            on a GPU.
    """

    inputs: EngineInputs
    workspace: Workspace
    memory_limit: int | None = None

    def __call__(self, nodes: Nodes) -> IntervalCosts:
        attention = self.inputs.attention
        probes, dim = attention.queries.shape[1:]
        width = nodes.width
        # Five fields over (token, probe), three of keys and values, five over (token, token).
        per_node = 2 * width * (5 * probes + 3 * dim + 2 + 5 * width)
        limit = self.memory_limit or 2 ** (30 if attention.values.device.type == "cuda" else 25)
        size = max(1, limit // (4 * per_node))
        parts = []
        for first in range(0, len(nodes), size):
            some = nodes[first : first + size]
            self.workspace.reserve(per_node * len(some))
            parts.append(self._costs(some, width))
        costs, mass, drop = zip(*((x.costs, x.mass, x.drop) for x in parts), strict=True)
        return IntervalCosts(torch.cat(costs, dim=1), torch.cat(mass), torch.cat(drop))

    def _costs(self, nodes: Nodes, width: int) -> IntervalCosts:
        attention, batch, weights = self.inputs.attention, self.inputs.batch, self.inputs.weights
        tokens = len(attention.visible_probes)
        head, length = batch.head(nodes.tree), nodes.length[:, None]
        forwards = batch.token_rows(nodes, width) - (head * tokens)[:, None]
        first, last = forwards[:, :1], forwards[:, :1] + length - 1
        # [V, 2, w] offsets in the region: forwards, backwards; padding repeats the last token read.
        offset = torch.stack([forwards, first + last - forwards], dim=1)
        row = (offset + (head * tokens)[:, None, None]).flatten(0, 1)
        end = torch.stack([forwards, last.expand(-1, width)], dim=1)
        low, high = torch.minimum(offset, offset[..., :1]), torch.maximum(offset, offset[..., :1])
        origin = batch.region_start
        position = representative_positions(low + origin, high + origin + 1).flatten(0, 1)

        p = self._gather(attention.exponentials, row)
        z = _running_sum(p, self.workspace.take(*p.shape))
        z_tilde = self._prototype_mass(row, position, head.repeat_interleave(2))
        m_square, m_dot_v, v_square = self._aggregates(row, p)
        # Z D_q [R, w, P], in the memory of its terms.
        error = m_dot_v.addcmul_(z_tilde, v_square[..., None]).mul_(z_tilde)
        error.add_(m_square).clamp_(min=0.0).mul_(weights["lambda_m"])
        error.div_(m_square.clamp_(min=0.0).add_(weights["epsilon"]))
        z_error = z_tilde.sub_(z).square_().mul_(weights["lambda_z"])
        z_square = torch.mul(z, z, out=m_square)
        error.add_(z_error.div_(z_square.add_(weights["epsilon"]))).mul_(z)

        # Probes inside a node do not see its later tokens; those before it have no mass in it.
        holds_probe = attention.first_probe[first[:, 0]] < attention.first_probe[last[:, 0]]
        inner = torch.nonzero(holds_probe).flatten()
        sees = attention.positions >= (end[inner] + origin)[..., None]
        mass = attention.mass[row[::2]]
        error = error.unflatten(0, (-1, 2))
        p = p.unflatten(0, (-1, 2))
        if len(inner):
            error[inner] *= sees
            inverse = attention.inverse_sum[head[inner]][:, None]
            mass[inner] = (p[inner, 0] * sees[:, 1] * inverse).sum(dim=-1)
        inverse = attention.inverse_sum[head].repeat_interleave(2, dim=0)
        cost = torch.bmm(error.flatten(0, 1), inverse[..., None])[..., 0].unflatten(0, (-1, 2))
        cost /= attention.visible_probes[end]
        cost[..., 0] = 0.0
        mass = mass / attention.visible_probes[last]
        # Suffixes were read from the end; the one from token k on has length - k tokens.
        suffix = cost[:, 1].gather(1, last - forwards)
        padding = torch.arange(width, device=head.device) >= length
        costs = torch.stack([cost[:, 0], suffix])
        return IntervalCosts(costs, mass, mass.masked_fill(padding, 0.0).sum(dim=-1))

    def _gather(self, source: Tensor, row: Tensor) -> Tensor:
        """[R, w, ...]: rows [R, w] of `source`, in scratch memory."""
        out = self.workspace.take(row.numel(), source.shape[1])
        torch.index_select(source, 0, row.flatten(), out=out)
        return out.view(*row.shape, source.shape[1])

    def _prototype_mass(self, row: Tensor, position: Tensor, head: Tensor) -> Tensor:
        """Z~ [R, w, P] = exp(scale q.k~ + log m - max), as one product with two extra features."""
        attention = self.inputs.attention
        sequences, width = row.shape
        probes, dim = attention.queries.shape[1:]
        count = torch.arange(1, width + 1, device=row.device, dtype=torch.float32)
        mean_key = self._gather(attention.unrotated_keys, row)
        _running_sum(mean_key, mean_key).div_(count[:, None])
        norm_mean = running_sums(attention.key_norms[row]) / count
        context = self.inputs.batch.context
        multiplicity = context.rule.multiplicities(mean_key.norm(dim=-1), norm_mean, count)
        features = self.workspace.take(sequences, width, dim + 2)
        self.inputs.rope.rotate(mean_key, position, out=features[..., :dim])
        features[..., dim], features[..., dim + 1] = multiplicity.log(), 1.0
        others = torch.stack([torch.ones_like(attention.max_logit), -attention.max_logit], dim=-1)
        if (cap := context.prefill.softcap) is not None:
            # The cap comes between the product and the other two features.
            z_tilde = capped(torch.bmm(features[..., :dim], attention.queries[head].mT), cap)
            z_tilde += torch.bmm(features[..., dim:], others[head].mT)
            return z_tilde.clamp_(max=MAX_EXPONENT).exp_()
        queries = torch.cat([attention.queries, others], dim=-1)
        if row.device.type == "cuda":
            z_tilde = torch.bmm(features, queries[head].mT)
        else:
            # One product per head: a CPU multiplies tall matrices faster than many small ones.
            z_tilde = self.workspace.take(sequences, width, probes)
            first = 0
            heads, sizes = head.unique_consecutive(return_counts=True)
            for u, size in zip(heads.tolist(), sizes.tolist(), strict=True):
                block = slice(first, first := first + size)
                flat = linear(features[block].flatten(0, 1), queries[u])
                z_tilde[block] = flat.unflatten(0, (size, width))
        return z_tilde.clamp_(max=MAX_EXPONENT).exp_()

    def _aggregates(self, row: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """|M|^2 [R, w, P], -2 M.v~ [R, w, P] and |v~|^2 [R, w]."""
        sequences, width = row.shape
        values = self._gather(self.inputs.attention.values, row)
        gram = self.workspace.take(sequences, width, width)
        torch.bmm(values, values.mT, out=gram)
        causal = torch.ones(width, width, device=row.device, dtype=torch.float32).tril()
        count = torch.arange(1, width + 1, device=row.device, dtype=torch.float32)

        # v~ = V^T w with normalised weights w; M.v~ = sum_t p_t (Gram w)_t.
        scores, rule = self.inputs.attention.scores[row], self.inputs.batch.context.rule
        base = running_sums(scores) * (rule.uniform_base / count)
        weight = self.workspace.take(sequences, width, width)
        torch.add(scores[:, None, :], base[..., None], out=weight).mul_(causal)
        total = weight.sum(dim=-1, keepdim=True)
        weight.div_(total + rule.epsilon)
        torch.where(total > 0, weight, causal / count[:, None], out=weight)
        projected = self.workspace.take(sequences, width, width)
        torch.bmm(weight, gram, out=projected)
        v_square = weight.mul_(projected).sum(dim=-1)
        m_dot_v = self.workspace.take(*p.shape)
        torch.bmm(projected.mul_(-2.0 * causal), p, out=m_dot_v)

        # Token j adds 2 p_j v_j.M + p_j^2 |v_j|^2, with M of the tokens before it.
        m_square = self.workspace.take(*p.shape)
        twice = 2.0 * causal - torch.eye(width, device=row.device, dtype=torch.float32)
        torch.bmm(gram.mul_(twice), p, out=m_square)
        m_square.mul_(p)
        return _running_sum(m_square, m_square), m_dot_v, v_square


def _running_sum(x: Tensor, out: Tensor) -> Tensor:
    """Running sums over axis 1 of x [R, w, ...], written to `out`, which may be x."""
    if out is not x:
        out[:, 0] = x[:, 0]
    for k in range(1, x.shape[1]):
        torch.add(out[:, k - 1], x[:, k], out=out[:, k])
    return out
