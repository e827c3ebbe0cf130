"""The paper's sensitivity: how much a head can write and does write to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange, reduce
from torch import Tensor

from gracekv.kernels.uploads import on_device
from gracekv.prefill import Needs, Prefill, PromptSpans
from gracekv.prefill.observer import Accumulator, LayerObserver, Projection, TokenRun
from gracekv.registry import bounded
from gracekv.value.sensitivity import SENSITIVITIES, Sensitivity


@dataclass(frozen=True)
class ProjectionNorms(LayerObserver):
    """||W_O^{l,h}||_F of each query head's part of the output projection, float32 [L, H]."""

    reads = frozenset({"projection"})
    part = "projections"

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        return prefill.layers, prefill.query_heads

    def accumulator(self, layer: int, layers: int, spans: PromptSpans) -> Accumulator:
        return _Static()


class _Static:
    def __init__(self) -> None:
        self._norms = torch.empty(0, dtype=torch.float32)

    def add(self, run: TokenRun) -> None:
        assert run.projection is not None  # it is read
        # Now: offloaded weights may be here only while their layer runs.
        if not self._norms.numel():
            self._norms = projection_norms(run.projection, len(run.queries), run.queries)

    def result(self) -> Tensor:
        return self._norms


@dataclass(frozen=True)
class ProjectedNorms(LayerObserver):
    """||sum_{h in H(g)} W_O^{l,h} o_u^{l,h}||_2 at the question's probes u, float32 [L, G, P_q].

    o_u are attention outputs at `PromptSpans.question_probes`.
    """

    reads = frozenset({"outputs", "projection"})
    part = "projections"

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        return prefill.layers, prefill.kv_heads, len(prefill.spans.question_probes())

    def accumulator(self, layer: int, layers: int, spans: PromptSpans) -> Accumulator:
        return _Dynamic(spans)


class _Dynamic:
    def __init__(self, spans: PromptSpans) -> None:
        self._probes, self._parts = torch.tensor(spans.question_probes()), list[Tensor]()

    def add(self, run: TokenRun) -> None:
        assert run.outputs is not None  # they are read
        assert run.projection is not None
        inside = self._probes[(self._probes >= run.start) & (self._probes < run.end)]
        if len(inside):
            own = run.outputs[:, on_device(inside - run.start, run.outputs.device)]
            self._parts.append(projected_norms(run.projection, own, len(run.keys)))

    def result(self) -> Tensor:
        return torch.cat(self._parts, dim=1)


@SENSITIVITIES.register("output_projection", works_sharded=True)
class OutputProjection(Sensitivity):
    """Norm of a head's output projection times norm of its output at the question.

    The geometric mean of both (Eq. (V7)), divided by its mean over all heads (Eq. (V8)).

    Source: Eqs. (V7) and (V8); departures 3. Ours: the value of `epsilon`.

    Cost: only the capture's product of the question's head outputs with the output projections,
    less than 1 % of a prefill.

    Attributes:
        epsilon: keeps the denominator from 0; the value is ours.
    """

    epsilon: float = bounded(1e-12, above=0, at_most=1e-3, hint="It keeps a denominator from 0.")

    def needs(self) -> Needs:
        return Needs.observed(ProjectionNorms(), ProjectedNorms())

    def __call__(self, prefill: Prefill) -> Tensor:
        """Omega [L, G]; `MissingCaptureError` without the projections' norms."""
        device = prefill.keys[0].device
        squares = prefill.observation(ProjectionNorms()).to(device).float().square()
        static = reduce(squares, "l (g n) -> l g", "sum", g=prefill.kv_heads).sqrt()
        projected = prefill.observation(ProjectedNorms())
        raw = (static * projected.to(device).float().mean(dim=-1)).sqrt()
        return raw / (prefill.shard.mean(raw.mean()) + self.epsilon)


def projected_norms(projection: Projection, outputs: Tensor, groups: int) -> Tensor:
    """[G, P] float32: ||sum_{h in H(g)} W_O^h o_u^h||_2 at each of P positions.

    Args:
        projection: the output projection of the layer.
        outputs: [H, P, d] attention outputs before the projection.
        groups: G.

    Source: Eq. (V7) (dynamic strength, before its mean).
    """
    heads = outputs.shape[0]
    flat = rearrange(outputs, "h p d -> p h d")
    # Row g keeps the query heads of KV head g and is zero elsewhere.
    owner = torch.arange(heads, device=outputs.device) // (heads // groups)
    mine = owner == torch.arange(groups, device=outputs.device)[:, None]
    masked = torch.where(mine[:, None, :, None], flat, 0.0)
    projected = projection(rearrange(masked, "g p h d -> g p (h d)"))
    norms: Tensor = torch.linalg.vector_norm(projected.float(), dim=-1)
    return norms


def projection_norms(projection: Projection, heads: int, like: Tensor) -> Tensor:
    """[H] float32: ||W_O^h||_F.

    Args:
        projection: the output projection of the layer.
        heads: H.
        like: a tensor with the dtype and device of the model's states.

    Source: Eq. (V7) (static strength, before its sum).
    """
    columns = projection.weight(like).float().square().sum(dim=0)
    return rearrange(columns, "(h d) -> h d", h=heads).sum(dim=-1).sqrt()
