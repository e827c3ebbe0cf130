"""The attention that each position receives from the prompt's queries, a run of them at a time."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

# Bytes of logits at once: near a CPU's cache; on a GPU, enough work for each launch. Very long
# prompts exceed them rather than fall below a useful number of rows.
_CPU_BLOCK, _GPU_BLOCK, _LEAST_ROWS = 4 * 2**20, 256 * 2**20, 16


def block_rows(device: torch.device, heads: int, length: int) -> int:
    """Probes whose logits in `heads` query heads over `length` keys suit the device at once."""
    limit = _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK
    return max(_LEAST_ROWS, limit // (4 * heads * length))


def add_column_sums(
    total: Tensor,
    queries: Tensor,
    keys: Tensor,
    first: int,
    scale: float,
    *,
    block: int | None = None,
) -> None:
    """Add sum_u pi_{u,t} of a run of queries to `total`, float32 [H, T].

    One causal attention pass without values: a block of queries attends to the keys up to its last
    query, so its softmax rows are complete, and all blocks share two buffers.

    Args:
        total: [H, T], changed in place; on the keys' device.
        queries: [H, C, d] of the positions first, first + 1, ...
        keys: [G, at least first + C, d].
        first: absolute position of the first query.
        scale: of the logits.
        block: queries at once; None: what suits the device.

    Source: the column sums of H2O (Zhang et al., 2023, arXiv:2306.14048); the blocks: ours.
    """
    groups, heads, device = len(keys), len(queries), keys.device
    end = first + queries.shape[1]
    block = min(block or block_rows(device, heads, total.shape[1]), queries.shape[1])
    columns = keys[:, :end].float().transpose(1, 2)
    shared = rearrange(queries, "(g n) t d -> g n t d", g=groups)
    logits, shares = torch.empty(2, heads * block * end, device=device)
    later = torch.ones(block, block, dtype=torch.bool, device=device).triu(1)
    for start in range(first, end, block):
        stop = min(start + block, end)
        rows = stop - start
        size = heads * rows * stop
        some = shared[:, :, start - first : stop - first].float() * scale
        some = rearrange(some, "g n p d -> g (n p) d")
        torch.bmm(some, columns[..., :stop], out=logits[:size].view(groups, -1, stop))
        square = logits[:size].view(-1, rows, stop)
        square[..., start:].masked_fill_(later[:rows, :rows], -torch.inf)
        share = torch.softmax(square, dim=-1, out=shares[:size].view_as(square))
        # A product with ones adds rows up several times faster than a sum over a middle axis.
        total[:, :stop] += torch.ones(rows, device=device) @ share
