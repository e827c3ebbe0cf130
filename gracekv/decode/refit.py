"""Values and masses of what a cut leaves, fitted to the queries that were really asked."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gracekv.cache.base import RaggedEntries
from gracekv.decode.base import HeldLayer
from gracekv.fit.attended import LayerAttention, scattered
from gracekv.fit.values import with_values
from gracekv.fit.values_and_mass import multiplicities
from gracekv.kernels.linalg import batched_linear


def refitted(
    held: HeldLayer,
    kept: Tensor,
    packed: RaggedEntries,
    trust: float,
    mass_trust: float,
    trust_read: float,
) -> RaggedEntries:
    """`packed` with values and multiplicities that give the queries what all of `held` gave them.

    Args:
        held: all entries.
        kept: bool [G, N], those of `packed`.
        packed: one sequence.
        trust: as in `gracekv.fit.ValuesAndMass`, as are the others.
        mass_trust: prior of the multiplicities.
        trust_read: prior for being read.
    """
    if not held.moved.shape[2]:
        return packed
    logits, sink = held.logits(), held.sinks()
    top = torch.maximum(logits.amax(dim=-1), sink)
    chance = logits.sub_(top[..., None]).exp_()
    sink = (sink - top).exp()
    total = chance.sum(dim=-1) + sink
    values = held.values.float()
    output = batched_linear(chance, values.mT.contiguous()) / total[..., None]
    # Kept columns first, in order; heads with fewer are padded by columns of no mass.
    counts = kept.sum(dim=1)
    # Widths in steps: oneDNN compiles a product for each.
    width = -(-int(counts.max()) // 128) * 128
    order = (~kept).byte().argsort(dim=1, stable=True)[:, :width]
    free = kept.gather(1, order)
    mass = chance.gather(2, order[:, None].expand(-1, chance.shape[1], -1))
    place = torch.arange(order.shape[1], device=order.device)
    first = packed.offsets[:-1].to(order.device)
    attention = LayerAttention(
        columns=(first[:, None] + place).clamp_(max=max(0, packed.entries - 1)),
        free=free,
        mass=mass.mul_(free[:, None]),
        total=total,
        sink=sink,
        values=values.gather(1, order[..., None].expand(-1, -1, values.shape[2])),
        output=output,
        weights=output.new_full((output.shape[1],), 1 / output.shape[1]),
    )
    factor = multiplicities(attention, mass_trust, trust_read)
    layer = with_values(packed, attention, attention.shares(factor), trust, trust_read)
    weight = packed.log_multiplicity[attention.columns] + factor.log()
    return dataclasses.replace(
        layer, log_multiplicity=scattered(packed.log_multiplicity, attention, weight)
    )
