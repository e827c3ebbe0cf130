"""`TorchEvaluator`: the prototype's distortion in sweeps of torch, for any device.

A node is read twice, forwards for its prefixes and backwards for its suffixes; a sequence below is
one such reading. Nothing is a difference of long sums: Z, |M|^2 and the mean key grow token by
token, and M.v~ and the cross terms of |M|^2 are products with the Gram matrix of the node's values,
so M (d times larger) is never formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gracekv.linalg import linear
from gracekv.rope import Rope
from gracekv.tree.distortion import DistortionEvaluator, IntervalCosts, Nodes
from gracekv.tree.items import Items
from gracekv.tree.merge import PrototypeRule, representative_positions
from gracekv.tree.probe_attention import ProbeAttention
from gracekv.tree.workspace import Workspace

if TYPE_CHECKING:
    from gracekv.tree.prototype import Prototype

# A merged key can outscore every one of its tokens. Beyond e^20 times the probe's favourite the
# distortion is astronomical anyway, and its square over epsilon must stay finite in float32.
_MAX_EXPONENT = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class TorchEvaluator(DistortionEvaluator):
    """D of node ends in the heads of some layers.

    Attributes:
        weights: lambdas and epsilon.
        probed: the heads as the probes see them.
        items: their slots.
        rope: rotations of all positions.
        rule: how tokens merge.
        space: scratch memory.
    """

    weights: Prototype
    probed: ProbeAttention
    items: Items
    rope: Rope
    rule: PrototypeRule
    space: Workspace

    def __call__(self, nodes: Nodes) -> IntervalCosts:
        probes, dim = self.probed.queries.shape[1:]
        width = int(nodes.length.max())
        # Five fields over (token, probe), three of keys and values, five over (token, token).
        per_node = 2 * width * (5 * probes + 3 * dim + 2 + 5 * width)
        cuda = self.probed.values.device.type == "cuda"
        limit = self.weights.memory_limit or (2**30 if cuda else 2**25)
        size = max(1, limit // (4 * per_node))
        parts = []
        for first in range(0, len(nodes.item), size):
            some = Nodes(*(x[first : first + size] for x in (nodes.item, nodes.start, nodes.end)))
            self.space.reserve(per_node * len(some.item))
            parts.append(self._ends(some, width))
        return IntervalCosts(
            sides=torch.cat([part.sides for part in parts], dim=1),
            mass=torch.cat([part.mass for part in parts]),
            drop=torch.cat([part.drop for part in parts]),
        )

    def _ends(self, nodes: Nodes, width: int) -> IntervalCosts:
        probed, items = self.probed, self.items
        tokens = len(probed.seeing)
        head, length = items.head(nodes.item), nodes.length[:, None]
        first = items.offset(nodes.item, nodes.start)[:, None]
        step = torch.arange(width, device=first.device)
        # Columns beyond a node's end repeat its last token; nobody reads them.
        inner = torch.minimum(step, length - 1)
        # [V, 2, w] places in the region: forwards, backwards.
        place = torch.stack([first + inner, first + length - 1 - inner], dim=1)
        rows = (place + (head * tokens)[:, None, None]).flatten(0, 1)
        last = torch.stack([place[:, 0], (first + length - 1).expand(-1, width)], dim=1)
        middle = self._middles(place[:, :, :1].flatten(0, 1), place.flatten(0, 1))

        p = self._gather(probed.exponentials, rows)
        z = _running(p, self.space.take(*p.shape))
        z_tilde = self._prototype_mass(rows, middle, head.repeat_interleave(2))
        m_square, m_dot_v, v_square = self._aggregates(rows, p)
        error = self._errors(z, z_tilde, m_square, m_dot_v, v_square)

        # Probes inside a node do not see its later tokens; those before it have no mass in it.
        crossed = probed.before[place[:, 0, 0]] < probed.before[(first + length - 1)[:, 0]]
        crossed = torch.nonzero(crossed).flatten()
        sees = probed.positions >= (last[crossed] + items.region_start)[..., None]
        mass = probed.mass[rows[::2]]
        error = error.unflatten(0, (-1, 2))
        p = p.unflatten(0, (-1, 2))
        if len(crossed):
            error[crossed] *= sees
            inverse = probed.inverse_total[head[crossed]][:, None]
            mass[crossed] = (p[crossed, 0] * sees[:, 1] * inverse).sum(dim=-1)
        inverse = probed.inverse_total[head].repeat_interleave(2, dim=0)
        distortion = torch.bmm(error.flatten(0, 1), inverse[..., None])[..., 0].unflatten(
            0, (-1, 2)
        )
        distortion /= probed.seeing[last]
        distortion[..., 0] = 0.0
        mass = mass / probed.seeing[(first + length - 1)]
        # Suffixes were read from the end: the one from token k on has length - k tokens.
        suffix = distortion[:, 1].gather(1, length - 1 - inner)
        return IntervalCosts(
            sides=torch.stack([distortion[:, 0], suffix]),
            mass=mass,
            drop=torch.where(step < length, mass, 0.0).sum(dim=-1),
        )

    def _middles(self, start: Tensor, end: Tensor) -> Tensor:
        """int64 [R, w]: representative positions of what lies between two places, both included."""
        low, high = torch.minimum(start, end), torch.maximum(start, end) + 1
        return representative_positions(
            low + self.items.region_start, high + self.items.region_start
        )

    def _gather(self, source: Tensor, rows: Tensor) -> Tensor:
        """[R, w, ...]: rows [R, w] of `source`, in scratch memory."""
        out = self.space.take(rows.numel(), source.shape[1])
        torch.index_select(source, 0, rows.flatten(), out=out)
        return out.view(*rows.shape, source.shape[1])

    def _prototype_mass(self, rows: Tensor, middle: Tensor, head: Tensor) -> Tensor:
        """Z~ [R, w, P] = exp(scale q.k~ + log m - max); the last two ride as extra features."""
        probed = self.probed
        sequences, width = rows.shape
        probes, dim = probed.queries.shape[1:]
        count = torch.arange(1, width + 1, device=rows.device, dtype=torch.float32)
        mean_key = self._gather(probed.plain_keys, rows)
        _running(mean_key, mean_key).div_(count[:, None])
        norm_mean = probed.key_norms[rows].cumsum(dim=1) / count
        multiplicity = self.rule.multiplicities(mean_key.norm(dim=-1), norm_mean, count)
        features = self.space.take(sequences, width, dim + 2)
        self.rope.rotate(mean_key, middle, out=features[..., :dim])
        features[..., dim], features[..., dim + 1] = multiplicity.log(), 1.0
        ones = torch.ones_like(probed.top)[..., None]
        readers = torch.cat([probed.queries, ones, -probed.top[..., None]], dim=-1)
        if rows.device.type == "cuda":
            z_tilde: Tensor = torch.bmm(features, readers[head].mT)
        else:
            # One product per head: a CPU multiplies tall matrices faster than many small ones.
            z_tilde = self.space.take(sequences, width, probes)
            at = 0
            for u, size in zip(*(x.tolist() for x in head.unique_consecutive(return_counts=True)),
                               strict=True):  # fmt: skip
                block = slice(at, at := at + size)
                flat = linear(features[block].flatten(0, 1), readers[u])
                z_tilde[block] = flat.unflatten(0, (size, width))
        return z_tilde.clamp_(max=_MAX_EXPONENT).exp_()

    def _aggregates(self, rows: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """|M|^2 [R, w, P], -2 M.v~ [R, w, P] and |v~|^2 [R, w]."""
        sequences, width = rows.shape
        values = self._gather(self.probed.values, rows)
        gram = self.space.take(sequences, width, width)
        torch.bmm(values, values.mT, out=gram)
        seen = torch.ones(width, width, device=rows.device).tril()
        count = torch.arange(1, width + 1, device=rows.device, dtype=torch.float32)

        # v~ = V^T w with normalised weights w; M.v~ = sum_t p_t (Gram w)_t.
        worth = self.probed.worth[rows]
        base = worth.cumsum(dim=1) * (self.rule.uniform_base / count)
        weight = self.space.take(sequences, width, width)
        torch.add(worth[:, None, :], base[..., None], out=weight).mul_(seen)
        total = weight.sum(dim=-1, keepdim=True)
        weight.div_(total + self.rule.epsilon)
        torch.where(total > 0, weight, seen / count[:, None], out=weight)
        projected = self.space.take(sequences, width, width)
        torch.bmm(weight, gram, out=projected)
        v_square = weight.mul_(projected).sum(dim=-1)
        m_dot_v = self.space.take(*p.shape)
        torch.bmm(projected.mul_(-2.0 * seen), p, out=m_dot_v)

        # Token j adds 2 p_j v_j.M + p_j^2 |v_j|^2, M of the tokens before it.
        m_square = self.space.take(*p.shape)
        torch.bmm(gram.mul_(2.0 * seen - torch.eye(width, device=rows.device)), p, out=m_square)
        m_square.mul_(p)
        return _running(m_square, m_square), m_dot_v, v_square

    def _errors(
        self, z: Tensor, z_tilde: Tensor, m_square: Tensor, m_dot_v: Tensor, v_square: Tensor
    ) -> Tensor:
        """Z D_q [R, w, P]; all arguments but the last are used up."""
        weights = self.weights
        error = m_dot_v.addcmul_(z_tilde, v_square[..., None]).mul_(z_tilde)
        error.add_(m_square).clamp_(min=0.0).mul_(weights.lambda_m)
        error.div_(m_square.clamp_(min=0.0).add_(weights.epsilon))
        z_error = z_tilde.sub_(z).square_().mul_(weights.lambda_z)
        z_square = torch.mul(z, z, out=m_square)
        return error.add_(z_error.div_(z_square.add_(weights.epsilon))).mul_(z)


def _running(x: Tensor, out: Tensor) -> Tensor:
    """Running sums over axis 1 of x [R, w, ...], written to `out`, which may be x."""
    if out is not x:
        out[:, 0] = x[:, 0]
    for k in range(1, x.shape[1]):
        torch.add(out[:, k - 1], x[:, k], out=out[:, k])
    return out
