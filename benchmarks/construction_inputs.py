"""Inputs of `construction.py`: a book chapter, or a synthetic prefill with a model's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

from gracekv import Prefill, Prompt
from gracekv.kernels.rope import Rope
from gracekv.prefill import PromptSpans
from gracekv.segment.curvature import BlockInput
from gracekv.segment.surprisal import Surprisal
from gracekv.value.output_projection import ProjectedNorms, ProjectionNorms

PREFIX, SUFFIX = 16, 48


@dataclass(frozen=True)
class Geometry:
    """Shapes of a model."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    width: int


GEOMETRIES = {
    "qwen2.5-7b": Geometry(28, 28, 4, 128, 3584),
    "smollm2": Geometry(30, 9, 3, 64, 576),
    "tiny": Geometry(2, 4, 2, 16, 32),
}


def synthetic(shape: Geometry, length: int, device: str, dtype: torch.dtype) -> Prefill:
    """A prefill whose hidden states move between topics; K, V and Q are projections of them."""
    rng = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng, device=device)

    # Slots of real texts have about 30 tokens, so topics here do, too, on average.
    changes = torch.rand(length, generator=rng, device=device) < 1 / 30
    topic = changes.cumsum(0) % 64
    hidden = 2.0 * normal(64, shape.width)[topic] + normal(length, shape.width)
    normed = (hidden / hidden.square().mean(-1, keepdim=True).sqrt()).to(dtype)
    rope = Rope.of_theta(length, shape.dim, 1e6, torch.device(device))
    positions = torch.arange(length, device=device)

    def project(heads: int, rotates: bool) -> torch.Tensor:
        weight = (normal(shape.width, heads * shape.dim) / shape.width**0.5).to(dtype)
        flat = (normed @ weight).view(length, heads, shape.dim).transpose(0, 1)
        if not rotates:
            return flat.contiguous()
        # Head by head: a float32 copy of all queries would be larger than the whole prefill.
        return torch.stack([rope.rotate(x.float(), positions).to(dtype) for x in flat])

    spans = PromptSpans(PREFIX, length - SUFFIX, length - 8, length)
    probes = len(spans.question_probes())
    layers = range(shape.layers)
    return Prefill(
        spans=spans,
        keys=tuple(project(shape.kv_heads, True) for _ in layers),
        values=tuple(project(shape.kv_heads, False) for _ in layers),
        queries=tuple(project(shape.heads, True) for _ in layers),
        query_positions=torch.arange(length),
        rope=rope,
        scale=shape.dim**-0.5,
        observed={
            **{BlockInput(depth): hidden.to(dtype) for depth in (0.33, 0.5, 0.67, 0.75)},
            Surprisal(): normal(length).abs(),
            ProjectedNorms(): normal(shape.layers, shape.kv_heads, probes).abs() + 0.1,
            ProjectionNorms(): normal(shape.layers, shape.heads).abs() + 0.1,
        },
        token_ids=torch.arange(length),
    )


def prompt_of(tokenizer: Any, length: int) -> Prompt:
    text = files("gracekv.data").joinpath("alice_chapter_1.txt").read_text(encoding="utf-8")
    ids = tokenizer(text)["input_ids"]
    ids = (ids * (length // len(ids) + 1))[:length]
    return Prompt.from_ids(ids, context=(PREFIX, length - SUFFIX), question_end=length - 8)
