"""Synthetic prefills with structure: topics, coherent slots, a few tokens of high attention."""

from __future__ import annotations

from functools import partial

import torch

from gracekv.kernels.rope import Rope
from gracekv.prefill import Observer, Prefill, PromptSpans
from gracekv.segment.curvature import BlockInput
from gracekv.segment.surprisal import Surprisal
from gracekv.value.critical import WrittenNorms
from gracekv.value.draft_attention import Draft
from gracekv.value.kvzip_two_pass import Reconstruction
from gracekv.value.output_projection import ProjectedNorms, ProjectionNorms
from gracekv.value.repeated_attention import RepeatedQueries


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal random numbers [*shape] of `rng`, whatever torch's default dtype."""
    return torch.randn(*shape, generator=rng, dtype=dtype)


def synthetic_prefill(
    *,
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 16,
    context: int = 96,
    prefix: int = 4,
    question: int = 8,
    tail: int = 3,
    hidden_dim: int = 24,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Prefill:
    """A `Prefill` of prefix + context + question + tail tokens, with every capture present.

    Hidden states wander around topics that change every few dozen tokens; keys, values and
    queries are noisy projections of them, so slots cohere and a few tokens draw most attention.
    """
    rng = torch.Generator().manual_seed(seed)

    draw = partial(normal, rng, dtype=torch.float64)
    length = prefix + context + question + tail
    spans = PromptSpans(prefix, prefix + context, prefix + context + question, length)
    topic = torch.randint(0, 5, (length // 12 + 1,), generator=rng).repeat_interleave(12)[:length]
    hidden = 2.0 * draw(5, hidden_dim)[topic] + 0.3 * draw(length, hidden_dim).cumsum(0)
    hidden = hidden + 0.5 * draw(length, hidden_dim)
    # As after a model's input norm, so that logits stay in the range of real ones.
    normed = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    rope = Rope.of_theta(length, dim)
    positions = torch.arange(length)

    def project(heads: int, rotate: bool) -> torch.Tensor:
        flat = normed @ draw(hidden_dim, heads * dim) / hidden_dim**0.5
        x = flat.view(length, heads, dim).transpose(0, 1)
        return (rope.rotate(x, positions) if rotate else x).to(dtype).contiguous()

    heads = kv_heads * group
    keys = tuple(project(kv_heads, True) for _ in range(layers))
    values = tuple(project(kv_heads, False) for _ in range(layers))
    queries = tuple(project(heads, True) for _ in range(layers))
    probes = len(spans.question_probes())

    observed: dict[Observer, torch.Tensor] = {
        # Any depth may be asked for, so every layer's input is there.
        BlockInput(layer / layers): (hidden + layer * draw(length, hidden_dim) * 0.1).to(dtype)
        for layer in range(layers)
    }
    observed |= {
        Surprisal(): draw(length).abs().float(),
        ProjectedNorms(): draw(layers, kv_heads, probes).abs().float() + 0.1,
        ProjectionNorms(): draw(layers, heads).abs().float() + 0.1,
        WrittenNorms(): draw(layers, kv_heads, length).abs().float() + 0.1,
        Reconstruction(): draw(layers, kv_heads, context).abs().float().tanh(),
        RepeatedQueries(512): torch.stack(queries)[:, :, prefix:][:, :, :context][:, :, :512],
        Draft(64): draw(layers, kv_heads, 5, context).float().softmax(dim=-1),
        Reconstruction(power=3.0): draw(layers, kv_heads, context).abs().float().tanh(),
    }
    return Prefill(
        spans=spans,
        keys=tuple(x.to(device) for x in keys),
        values=tuple(x.to(device) for x in values),
        queries=tuple(x.to(device) for x in queries),
        query_positions=positions,
        rope=Rope(rope.cos.to(device), rope.sin.to(device)),
        scale=dim**-0.5,
        observed={observer: x.to(device) for observer, x in observed.items()},
        token_ids=torch.arange(length),
    )
