"""The probes' attention, input of all engines of the prototype's distortion, and their choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gracekv.errors import BackendUnavailableError
from gracekv.kernels.compiled import numba_obstacle
from gracekv.kernels.device import obstacle
from gracekv.kernels.linalg import capped, linear
from gracekv.kernels.rope import Rope
from gracekv.prefill import Prefill, Region
from gracekv.tree.tree_batch import TreeBatch, Workspace


def probe_queries(prefill: Prefill, layer: int, probes: Tensor) -> Tensor:
    """[G, P, d] float32: probe i of KV head g uses query head g*n + i mod n."""
    queries, n = prefill.queries_at(layer, probes).float(), prefill.group
    probe = torch.arange(len(probes), device=queries.device)
    head = torch.arange(prefill.kv_heads, device=queries.device)[:, None] * n + probe % n
    return queries[head, probe]


class ProbeAttention:
    """Attention of P probes to the N compressible tokens of U heads (some layers' KV heads).

    Tokens of all heads are concatenated, so one row index identifies a token of a head. The large
    tensors are in `workspace.persistent`: the next `ProbeAttention` in it overwrites them.

    Args:
        batch: the trees of some layers.
        probes: int64 [n] ascending; those that see no token of the region are dropped.
        workspace: its persistent memory is used.

    Attributes:
        positions: int64 [P] ascending probe positions.
        queries: [U, P, d] float32, times the attention scale; like `unrotated_keys` in the feature
            order of `Rope.in_halves`.
        max_logit: [U, P], over the visible tokens.
        inverse_sum: 1 / Z_C [U, P], where Z_C is the sum of `exponentials`.
        exponentials: p [U*N, P], e^(logit - max_logit); 0 where the probe cannot see.
        mass: sum over the probes of p / Z_C [U*N].
        unrotated_keys: k^o [U*N, d].
        key_norms: |k^o| [U*N].
        values: [U*N, d].
        scores: R^tok [U*N] float32.
        visible_probes: float32 [N], number of probes that see each token.
        first_probe: int64 [N+1], the first probe that sees each token (and the region's end).
    """

    def __init__(self, batch: TreeBatch, probes: Tensor, workspace: Workspace) -> None:
        layers, prefill = batch.layers, batch.context.prefill
        region, device = batch.context.partition.region, prefill.keys[layers[0]].device
        # Query heads alternate over all probes, so probes are dropped afterwards.
        queries = torch.cat([probe_queries(prefill, layer, probes) for layer in layers])
        queries = queries[:, probes >= region.start] * prefill.scale
        probes = probes[probes >= region.start]
        masked = int((probes < region.end - 1).sum())
        self.positions = probes = probes.to(device)
        heads, tokens, dim = len(queries), region.length, prefill.head_dim
        buffer = workspace.persistent
        buffer.reserve(heads * tokens * (len(probes) + 2 * dim))
        positions = torch.arange(region.start, region.end, device=device)
        keys = buffer.take(heads, tokens, dim)
        _copy([prefill.keys[layer] for layer in layers], region, keys)
        logits = buffer.take(heads, tokens, len(probes))
        _head_products(keys, queries, logits)
        capped(logits, prefill.softcap)
        logits[..., :masked].masked_fill_(positions[:, None] > probes[:masked], -torch.inf)
        self.max_logit = logits.amax(dim=1)
        exponentials = logits.sub_(self.max_logit[:, None]).exp_()
        self.inverse_sum = 1.0 / exponentials.sum(dim=1)
        self.exponentials = exponentials.flatten(0, 1)
        self.mass = _weighted_sum(exponentials, self.inverse_sum)
        rope = prefill.rope_of(layers[0])
        unrotated = rope.unrotate(keys, positions, out=buffer.take(heads, tokens, dim))
        _, order = rope.in_halves(dim)
        if order is not None:
            order = order.to(device)
            queries, unrotated = queries[..., order], unrotated[..., order]
        self.queries = queries
        self.unrotated_keys = unrotated.flatten(0, 1)
        self.key_norms = unrotated.norm(dim=-1).flatten()
        # Rotated keys are not read again, so values reuse their memory.
        _copy([prefill.values[layer] for layer in layers], region, keys)
        self.values = keys.flatten(0, 1)
        self.scores = batch.scores.float().flatten()
        bounds = torch.arange(region.start, region.end + 1, device=device)
        self.first_probe = torch.searchsorted(probes, bounds)
        self.visible_probes = (len(probes) - self.first_probe[:-1]).float()


def _copy(layers: list[Tensor], region: Region, out: Tensor) -> None:
    """The region's tokens of some layers [G, T, d] to out [U, N, d] float32."""
    for target, layer in zip(out.chunk(len(layers)), layers, strict=True):
        target.copy_(layer[:, region.start : region.end])


def _head_products(x: Tensor, y: Tensor, out: Tensor) -> None:
    """out <- x y^T of each head: [U, N, d] and [U, P, d] to [U, N, P]."""
    if x.device.type != "cpu":
        torch.bmm(x, y.mT, out=out)
        return
    # Head by head, since torch's batched product takes twice as long here.
    for u in range(len(x)):
        out[u] = linear(x[u], y[u])


def _weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """sum over p of x_p w_p of each head: [U, N, P] and [U, P] to [U*N]."""
    if x.device.type != "cpu":
        return torch.bmm(x, weights[..., None]).flatten()
    return torch.cat([torch.mv(head, w) for head, w in zip(x, weights, strict=True)])


Engine = Literal["auto", "numba", "torch", "triton"]

LARGEST_DIM = 256
"""Largest head dimension that the engine `triton` supports."""

MAX_EXPONENT = 20.0
"""Largest log of Z~. A merged key can score higher than each of its tokens. Beyond e^20 times the
probe's largest exponential the distortion is huge anyway, and its square over epsilon must be
finite in float32."""


# Attributes of `ProbeAttention` that not all kernels read.
_UNREAD = ("positions", "mass")


@dataclass(frozen=True, slots=True, eq=False)
class EngineInputs:
    """The inputs of an engine, for the heads of some layers.

    Attributes:
        weights: `lambda_z` of the partition error, `lambda_m` of the value-aggregate error, and
            `epsilon`, added to both denominators.
        attention: the probes' attention to these heads.
        batch: the trees of these heads.
        rope: the rotations of all positions, in halves.
    """

    weights: Mapping[str, float]
    attention: ProbeAttention
    batch: TreeBatch
    rope: Rope

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of `attention` that kernels read, by name; and cos and sin [T, d_rot]."""
        kept = {name: x for name, x in vars(self.attention).items() if name not in _UNREAD}
        # A model on several devices has its table on the first layer's.
        cos, sin = (x.to(self.attention.values.device) for x in (self.rope.cos, self.rope.sin))
        return kept | {"cos": cos, "sin": sin}

    def numbers(self) -> dict[str, Any]:
        """The numbers that kernels read of region, distortion and rule, by name."""
        rule = self.batch.context.rule
        return {
            **self.weights,
            "tokens": len(self.attention.visible_probes),
            "region_start": self.batch.region_start,
            "uniform_base": float(rule.uniform_base),
            "rule_epsilon": float(rule.epsilon),
        }


_FASTEST: Mapping[str, Engine] = {"cpu": "numba", "cuda": "triton"}


def select_engine(engine: Engine, values: Tensor, softcap: float | None = None) -> Engine:
    """The engine for a cache with these values [..., d] and this softcap; never "auto".

    "auto" chooses the fastest that can run: "numba" on CPUs, "triton" on GPUs, "torch" if neither
    is available. Raises `BackendUnavailableError` if the requested `engine` cannot run.
    """
    chosen = _FASTEST.get(values.device.type, "torch") if engine == "auto" else engine
    reason = None if chosen == "torch" else _obstacle(chosen, values, softcap)
    if reason is not None and engine != "auto":
        raise BackendUnavailableError(f"The distortion's engine {engine!r} cannot run. {reason}")
    return chosen if reason is None else "torch"


def _obstacle(engine: Engine, values: Tensor, softcap: float | None) -> str | None:
    """The reason why a compiled engine cannot run, with a remedy; None if it can."""
    dim, kind = values.shape[-1], type(values)
    if softcap is not None:
        return f"It does not cap logits, as this model does at {softcap:g}. Use engine 'torch'."
    # Kernels read memory, which tensor subclasses (traced, sharded ...) may not have.
    if kind is not Tensor:
        return f"It reads plain tensors; the cache is of type {kind.__name__}. Use engine 'torch'."
    if engine == "numba":
        reason = numba_obstacle()
        if values.device.type != "cpu":
            reason = f"It needs a cache on a CPU; this one is on {values.device}. Move it"
        return reason and f"{reason}, or use engine 'torch'."
    if dim > LARGEST_DIM:
        return f"It reads heads of dimension {LARGEST_DIM} or less; got {dim}. Use engine 'torch'."
    return obstacle(values.device, "engine 'torch'")
