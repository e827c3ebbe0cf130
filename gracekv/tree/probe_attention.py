"""`ProbeAttention`: the compressible tokens of some layers as the distortion's probes see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.linalg import linear
from gracekv.prefill import Region
from gracekv.tree.context import TreeContext
from gracekv.tree.probes import probe_queries
from gracekv.tree.workspace import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class ProbeAttention:
    """N compressible tokens of U heads (some layers' KV heads) and P probes.

    Tokens of all heads follow one another, so that one row index finds a token of a head.

    Attributes:
        positions: int64 [P] ascending probe positions.
        queries: [U, P, d] float32, times the attention scale.
        top: [U, P] largest visible logit.
        inverse_total: 1 / Z_C [U, P].
        exponentials: p [U*N, P]; 0 where the probe cannot see.
        mass: sum over the probes of p / Z_C [U*N].
        plain_keys: k^o [U*N, d].
        key_norms: |k^o| [U*N].
        values: [U*N, d].
        worth: R^tok [U*N] float32.
        seeing: float32 [N], probes that see each token.
        before: int64 [N+1], probes at positions before each token (and before the region's end).
    """

    positions: Tensor
    queries: Tensor
    top: Tensor
    inverse_total: Tensor
    exponentials: Tensor
    mass: Tensor
    plain_keys: Tensor
    key_norms: Tensor
    values: Tensor
    worth: Tensor
    seeing: Tensor
    before: Tensor

    @classmethod
    def of(
        cls, context: TreeContext, layers: Sequence[int], probes: Tensor, space: Workspace
    ) -> ProbeAttention:
        """Gather some layers; of `probes` [n], those that see none of the region are left out.

        The large tensors lie in `space.lasting`, so the next call with that space voids them.
        """
        prefill, region = context.prefill, context.partition.region
        device = prefill.keys[layers[0]].device
        # Heads take turns over all probes; only then those that see no compressible token go.
        queries = torch.cat([probe_queries(prefill, layer, probes) for layer in layers])
        queries = queries[:, probes >= region.start] * prefill.scale
        probes = probes[probes >= region.start].to(device)
        heads, tokens, dim = len(queries), region.length, prefill.head_dim
        room = space.lasting
        room.reserve(heads * tokens * (len(probes) + 2 * dim))
        at = torch.arange(region.start, region.end, device=device)
        keys = room.take(heads, tokens, dim)
        _copy([prefill.keys[layer] for layer in layers], region, keys)
        logits = room.take(heads, tokens, len(probes))
        _products(keys, queries, logits)
        blind = int((probes < region.end - 1).sum())
        logits[..., :blind].masked_fill_(at[:, None] > probes[:blind], -torch.inf)
        top = logits.amax(dim=1)
        exponentials = logits.sub_(top[:, None]).exp_()
        inverse_total = 1.0 / exponentials.sum(dim=1)
        plain = prefill.rope.unrotate(keys, at, out=room.take(heads, tokens, dim))
        # Rotated keys are not read again.
        values = keys
        _copy([prefill.values[layer] for layer in layers], region, values)
        bounds = torch.arange(region.start, region.end + 1, device=device)
        return cls(
            positions=probes,
            queries=queries,
            top=top,
            inverse_total=inverse_total,
            exponentials=exponentials.flatten(0, 1),
            mass=_weighted(exponentials, inverse_total),
            plain_keys=plain.flatten(0, 1),
            key_norms=plain.norm(dim=-1).flatten(),
            values=values.flatten(0, 1),
            worth=context.scores[list(layers)].to(device).float().flatten(),
            seeing=(len(probes) - torch.searchsorted(probes, at)).float(),
            before=torch.searchsorted(probes, bounds),
        )


def _copy(layers: list[Tensor], region: Region, out: Tensor) -> None:
    """The region's tokens of some layers [G, T, d] to out [U, N, d] float32."""
    for own, layer in zip(out.chunk(len(layers)), layers, strict=True):
        own.copy_(layer[:, region.start : region.end])


def _products(x: Tensor, y: Tensor, out: Tensor) -> None:
    """out <- x y^T of each head: [U, N, d] and [U, P, d] to [U, N, P]."""
    if x.device.type != "cpu":
        torch.bmm(x, y.mT, out=out)
        return
    # One product after the other: torch's own product of batches is half as fast here.
    for u in range(len(x)):
        out[u] = linear(x[u], y[u])


def _weighted(x: Tensor, weights: Tensor) -> Tensor:
    """sum over p of x_p w_p of each head: [U, N, P] and [U, P] to [U*N]."""
    if x.device.type != "cpu":
        return torch.bmm(x, weights[..., None]).flatten()
    return torch.cat([torch.mv(own, w) for own, w in zip(x, weights, strict=True)])
