"""Attention problems over ragged layers, and their answers written out in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.cache.base import RaggedLayer


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What a backend is asked.

    Attributes:
        layer: the packed part.
        query: [B, H, Tq, d].
        keys: [B, G, S, d], a slice of a longer buffer whose other places are NaN.
        values: [B, G, S, d], likewise.
        mask: bool or float [B, 1, Tq, S], or None.
        rows: int64 [B], or None.
        scale: factor of q . k.
    """

    layer: RaggedLayer
    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    rows: Tensor | None
    scale: float


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
    device: str = "cpu",
) -> Problem:
    """A random problem; what lies beside the entries that may be read is NaN.

    Args:
        seed: of all numbers.
        lengths: entries of each row s*G + g.
        dim: d.
        group: query heads of a KV head.
        batch: B.
        tokens: Tq.
        tail: S.
        mask: "none", "bool" or "float"; some rows of a "bool" mask see nothing.
        dtype: of queries, keys and values.
        sequences: S of the layer.
        shuffled: whether `rows` is drawn; otherwise it is None.
        device: where everything but the offsets lies.
    """
    rng = torch.Generator().manual_seed(seed)

    def poisoned(*shape: int) -> Tensor:
        """Random numbers in the middle of a buffer of NaN along the last axis but one."""
        whole = (*shape[:-2], shape[-2] + 5, shape[-1])
        buffer = torch.full(whole, math.nan, dtype=dtype, device=device)
        inside = buffer.narrow(-2, 2, shape[-2])
        inside.copy_(torch.randn(shape, generator=rng).to(dtype))
        return inside

    entries, heads = sum(lengths), len(lengths) // sequences
    layer = RaggedLayer(
        keys=poisoned(entries, dim),
        values=poisoned(entries, dim),
        positions=torch.arange(entries, dtype=torch.int32, device=device),
        log_multiplicity=(torch.rand(entries, generator=rng) * 4).to(device),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        sequences=sequences,
    )
    seen: Tensor | None = None
    if mask == "bool":
        seen = torch.rand(batch, 1, tokens, tail, generator=rng) < 0.6
        seen[0, :, 0] = False
    elif mask == "float":
        seen = torch.randn(batch, 1, tokens, tail, generator=rng)
    rows = torch.randint(sequences, (batch,), generator=rng) if shuffled else None
    return Problem(
        layer=layer,
        query=torch.randn(batch, heads * group, tokens, dim, generator=rng).to(device, dtype),
        keys=poisoned(batch, heads, tail, dim),
        values=poisoned(batch, heads, tail, dim),
        mask=None if seen is None else seen.to(device),
        rows=None if rows is None else rows.to(device),
        scale=dim**-0.5,
    )


def dense_attention(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, d] and the lse of both parts [2, B, H, Tq], float64 on the CPU."""
    layer, query = problem.layer, problem.query.double().cpu()
    batch, heads, tokens, _ = query.shape
    length = problem.keys.shape[2]
    output = torch.zeros_like(query)
    lse = torch.full((2, batch, heads, tokens), -math.inf, dtype=torch.float64)
    for b in range(batch):
        share = batch // layer.sequences if problem.rows is None else 1
        sequence = b // share if problem.rows is None else int(problem.rows[b])
        if problem.mask is None:
            hidden = torch.ones(tokens, length).tril(length - tokens) == 0
            added = torch.zeros(tokens, length, dtype=torch.float64).masked_fill(hidden, -math.inf)
        elif problem.mask.dtype == torch.bool:
            hidden = ~problem.mask[b, 0].cpu()
            added = torch.zeros(tokens, length, dtype=torch.float64).masked_fill(hidden, -math.inf)
        else:
            added = problem.mask[b, 0].double().cpu()
        for h in range(heads):
            g = h // (heads // layer.heads)
            k, v, _, log_m = (x.double().cpu() for x in layer.head(g, sequence))
            packed = query[b, h] @ k.T * problem.scale + log_m
            tail = query[b, h] @ problem.keys[b, g].double().cpu().T * problem.scale + added
            lse[0, b, h], lse[1, b, h] = packed.logsumexp(-1), tail.logsumexp(-1)
            logits = torch.cat([packed, tail], dim=-1)
            everything = torch.cat([v, problem.values[b, g].double().cpu()])
            # A query that sees nothing has no softmax; its answer is 0.
            weights = logits.softmax(-1).nan_to_num(0.0)
            output[b, h] = weights @ everything
    return output, lse
