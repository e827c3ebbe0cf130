"""Random attention problems over ragged layers, tolerances, and checks of a backend on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gracekv.backends.base import AttentionBackend, AttentionSpec, AttentionStep, Backend
from gracekv.backends.reference import attention
from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.precision import UniformPrecision
from gracekv.prefill import Region
from gracekv.testing.prefills import normal

TOLERANCES: Mapping[torch.dtype, float] = {
    # Sums of a few thousand terms have an error of 6e-7; three times that.
    torch.float32: 2e-6,
    # Rounding the output alone costs 2.1e-4 and 1.7e-3; statistics are float32.
    torch.float16: 5e-4,
    torch.bfloat16: 4e-3,
}
"""Relative Frobenius error of attention outputs against float64, by dtype of the inputs."""


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want||_F / ||want||_F in float64 for tensors [any shape]; 0 if both are 0."""
    got, want = got.double(), want.double()
    difference = float(torch.linalg.vector_norm(got - want))
    return difference / max(float(torch.linalg.vector_norm(want)), 1e-300) if difference else 0.0


def attention_problem(
    seed: int,
    lengths: list[int],
    *,
    dim: int = 64,
    group: int = 1,
    batch: int = 1,
    tokens: int = 1,
    tail: int = 1,
    mask: str = "none",
    dtype: torch.dtype = torch.float32,
    sequences: int = 1,
    shuffled: bool = False,
    softcap: float | None = None,
    sinks: bool = False,
    device: str = "cpu",
) -> AttentionStep:
    """A random step over a `RaggedEntries`; storage that must not be read is NaN.

    Args:
        seed: seed of all numbers.
        lengths: entries of each row s*G + g.
        dim: head dimension d.
        group: query heads per KV head.
        batch: batch size B.
        tokens: number of queries Tq.
        tail: number of tail tokens S.
        mask: "none", "bool" or "float"; some rows of a "bool" mask see nothing.
        dtype: dtype of queries, keys and values.
        sequences: number of sequences in the layer.
        shuffled: whether `rows` is drawn; otherwise it is None.
        softcap: logit softcap, or None.
        sinks: whether query heads have sink logits.
        device: device of everything but the offsets.
    """
    rng = torch.Generator().manual_seed(seed)

    def poisoned(*shape: int) -> Tensor:
        """Random numbers in the middle of a buffer of NaN along the second to last axis."""
        whole = (*shape[:-2], shape[-2] + 5, shape[-1])
        inside = torch.full(whole, torch.nan, dtype=dtype, device=device).narrow(-2, 2, shape[-2])
        inside.copy_(normal(rng, *shape).to(dtype))
        return inside

    entries, heads = sum(lengths), len(lengths) // sequences
    layer = RaggedEntries(
        keys=poisoned(entries, dim),
        values=poisoned(entries, dim),
        positions=torch.arange(entries, dtype=torch.int32, device=device),
        log_multiplicity=(torch.rand(entries, generator=rng, dtype=torch.float32) * 4).to(device),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        sequences=sequences,
    )
    seen: Tensor | None = None
    if mask == "bool":
        seen = torch.rand(batch, 1, tokens, tail, generator=rng, dtype=torch.float32) < 0.6
        seen[0, :, 0] = False
    elif mask == "float":
        seen = normal(rng, batch, 1, tokens, tail)
    rows = torch.randint(sequences, (batch,), generator=rng) if shuffled else None
    return AttentionStep(
        query=normal(rng, batch, heads * group, tokens, dim).to(device, dtype),
        packed=layer,
        keys=poisoned(batch, heads, tail, dim),
        values=poisoned(batch, heads, tail, dim),
        scale=dim**-0.5,
        mask=None if seen is None else seen.to(device),
        softcap=softcap,
        rows=None if rows is None else rows.to(device),
        sink_logits=normal(rng, heads * group).to(device, dtype) if sinks else None,
    )


def check_attention(
    backend: AttentionBackend, problem: AttentionStep, *, bound: float | None = None
) -> None:
    """Assert that attention to all entries, and to the packed part alone, matches float64.

    `problem.packed` holds the entries themselves; `bound` is the maximum relative error of outputs,
    by default their dtype's in `TOLERANCES`.
    """
    output_bound = TOLERANCES[problem.query.dtype] if bound is None else bound
    prepared = backend.prepare(problem.packed)
    keys, values = problem.keys[:, :, :0], problem.values[:, :, :0]
    for step in (problem, replace(problem, keys=keys, values=values, mask=None)):
        want, lse = attention(step)
        output = backend(replace(step, packed=prepared))
        assert output.dtype == step.query.dtype
        assert output.shape == step.query.shape
        assert relative_error(output.cpu(), want) <= output_bound
        assert bool((output.cpu()[(lse == -torch.inf).all(0)] == 0).all())


def check_backend(backend: Backend, seed: int) -> None:
    """Attention matches a float64 reference within its dtype's tolerance.

    Also with softcaps, sink logits, several sequences, tails of different lengths, and quantised
    entries unless they are an `obstacle`.

    Raises `AssertionError` otherwise, and if entries hidden by a mask or cache were read.
    """
    precision = UniformPrecision(bits=4, group=4, sinks=0)
    for case, dtype in enumerate((torch.float32, torch.bfloat16) * 2):
        drawn: dict[str, Any] = {"tokens": 1 + seed % 3, "sequences": 1 + case // 2, "dtype": dtype}
        drawn |= {"softcap": 2.0 if seed % 2 else None, "sinks": seed // 2 % 2 == 1}
        drawn |= {"shuffled": seed % 2 == 1, "mask": ("none", "bool", "float")[(seed + case) % 3]}
        problem = attention_problem(seed, [5, 0, 17, 1], group=2, batch=2, tail=4, **drawn)
        if problem.mask is None:
            problem = replace(problem, length=torch.tensor([3, 4]))
        plain = problem.packed
        widths = precision.widths(plain.positions, Region(0, 17))
        stored = precision(RaggedCache((plain,), 17, (0,) * plain.sequences), [widths])
        for layer in (plain, *stored.layers):
            spec = AttentionSpec.of(layer)
            chosen = backend.resolve(spec)
            if chosen.obstacle(spec) is None:
                check_attention(chosen, replace(problem, packed=layer))
