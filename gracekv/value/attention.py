"""Attention probabilities of chosen positions, and how much each context token receives.

Every score of this stage is some weighted sum of such probabilities.

Source: Eq. (V1); computing sums in blocks of probes is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from gracekv.linalg import linear
from gracekv.prefill import Prefill, Region

# Bytes of logits that are held at once: near a CPU's cache; on a GPU, enough work for each launch.
# Very long prompts exceed them rather than fall below a useful number of rows.
_CPU_BLOCK, _GPU_BLOCK, _LEAST_ROWS = 4 * 2**20, 256 * 2**20, 16


def probabilities(prefill: Prefill, layer: int, probes: Sequence[int] | Tensor) -> Tensor:
    """pi: how each probe spreads its attention over all that it sees, float32 [H, P, S].

    Args:
        prefill: H query heads that share G KV heads.
        layer: 0-based.
        probes: P >= 1 absolute positions.

    S = max(probes) + 1: nobody sees a later key, so the columns up to T are left out. Columns
    after a probe's own position are exactly 0; each row sums to 1. Keys and queries are raised to
    float32 before their product.

    Raises `MissingCaptureError` if a probe's query was not captured.
    """
    at = torch.as_tensor(probes, dtype=torch.int64, device="cpu")
    keys, heads = prefill.keys[layer], prefill.kv_heads
    after, stop = int(at.min()) + 1, int(at.max()) + 1
    queries = prefill.queries_at(layer, at).float() * prefill.scale
    # One product per KV head for all query heads that share it: K is never repeated.
    shared = rearrange(queries, "(g n) p d -> g (n p) d", g=heads)
    logits = shared @ keys[:, :stop].float().transpose(1, 2)
    logits = rearrange(logits, "g (n p) s -> (g n) p s", p=len(at))
    # Everyone sees the keys up to the earliest probe; only the columns after it need a mask.
    unseen = torch.arange(after, stop) > at[:, None]
    logits[..., after:].masked_fill_(unseen.to(logits.device), -torch.inf)
    return torch.softmax(logits, dim=-1)


def received(
    prefill: Prefill,
    layer: int,
    probes: Sequence[int] | Tensor,
    region: Region,
    weights: Tensor | None = None,
    *,
    block: int | None = None,
) -> Tensor:
    """sum_u w_u pi_{u,t}: attention that each token of `region` receives, float32 [H, N].

    The softmax runs over everything that a probe sees; the slice to the region comes after it.

    Args:
        prefill: H query heads.
        layer: 0-based.
        probes: P absolute positions.
        region: the N tokens that are scored.
        weights: w [P]; None: all 1.
        block: probes per block; None: what suits the device. Changes memory and time only. A
            block works on the keys up to its last probe, so ascending probes are cheapest.

    Raises `MissingCaptureError` if a probe's query was not captured.
    """
    at = torch.as_tensor(probes, dtype=torch.int64, device="cpu")
    keys, groups = prefill.keys[layer].float(), prefill.kv_heads
    device = keys.device
    total = torch.zeros(groups, prefill.group, region.length, device=device)
    share = torch.ones(len(at)) if weights is None else weights
    share = share.to(device=device, dtype=torch.float32)
    block = block or block_rows(prefill, device, prefill.group)
    for first in range(0, len(at), block):
        rows = at[first : first + block]
        after, stop = int(rows.min()) + 1, int(rows.max()) + 1
        queries = prefill.queries_at(layer, rows).float() * prefill.scale
        shared = rearrange(queries, "(g n) p d -> g (n p) d", g=groups)
        unseen = (torch.arange(after, stop) > rows[:, None]).to(device)
        # Head by head: what one product makes is still in the cache when it is read again.
        for head in range(groups):
            logits = linear(shared[head], keys[head, :stop]).view(-1, len(rows), stop)
            logits[..., after:].masked_fill_(unseen, -torch.inf)
            chance = torch.softmax(logits, dim=-1, out=logits)
            seen = chance[..., region.start : region.end]
            total[head, :, : seen.shape[-1]] += share[first : first + block] @ seen
    return total.flatten(0, 1)


def block_rows(prefill: Prefill, device: torch.device, heads: int) -> int:
    """Probes whose logits in `heads` query heads over the whole prompt suit the device at once."""
    limit = _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK
    return max(_LEAST_ROWS, limit // (4 * heads * prefill.spans.length))


def all_column_sums(prefill: Prefill) -> Tensor:
    """`column_sums` of all layers for all prompt positions, float32 [L, H, T]; on layer 0's device.

    Raises `MissingCaptureError` unless the queries of every position were captured.
    """
    device, prompt = prefill.keys[0].device, Region(0, prefill.spans.length)
    return torch.stack([column_sums(prefill, i, prompt).to(device) for i in range(prefill.layers)])


def column_sums(
    prefill: Prefill, layer: int, region: Region, *, block: int | None = None
) -> Tensor:
    """sum over all prompt queries of pi_{u,t}, float32 [H, N]; never T x T (baselines' S2).

    One causal attention pass without values: a block of queries meets the keys up to its last
    query, so its softmax rows are complete, and all blocks share two buffers. Queries before the
    region see none of it and are skipped.

    Raises `MissingCaptureError` unless the queries of every position were captured.
    """
    length, heads, group = prefill.spans.length, prefill.kv_heads, prefill.group
    complete = len(prefill.query_positions) == length
    # A complete capture is read where it lies; of any other, the error names what is missing.
    queries = (
        prefill.queries[layer] if complete else prefill.queries_at(layer, torch.arange(length))
    )
    keys = prefill.keys[layer].float().transpose(1, 2)
    queries = rearrange(queries, "(g n) t d -> g n t d", g=heads)
    device = keys.device
    block = min(block or block_rows(prefill, device, heads * group), length)
    logits, shares = torch.empty(2, heads * group * block * length, device=device)
    later = torch.ones(block, block, dtype=torch.bool, device=device).triu(1)
    total = torch.zeros(heads * group, length, device=device)
    for first in range(region.start, length, block):
        last = min(first + block, length)
        rows = last - first
        size = heads * group * rows * last
        some = rearrange(queries[:, :, first:last].float() * prefill.scale, "g n p d -> g (n p) d")
        torch.bmm(some, keys[..., :last], out=logits[:size].view(heads, -1, last))
        square = logits[:size].view(-1, rows, last)
        square[..., first:].masked_fill_(later[:rows, :rows], -torch.inf)
        share = torch.softmax(square, dim=-1, out=shares[:size].view_as(square))
        # A product with ones adds rows up several times faster than a sum over a middle axis.
        total[:, :last] += torch.ones(rows, device=device) @ share
    return total[:, region.start : region.end]
