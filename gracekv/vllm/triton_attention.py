"""Attention of a step's tokens over their contexts and vLLM's pages, on GPUs.

Plans the step's work for a GPU and launches the Triton kernels. Importing this module imports
triton.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gracekv.backends.triton_tiles import Tiles, merge_step, padded_dim, tiles
from gracekv.cache.base import RaggedEntries
from gracekv.kernels import device as gpu
from gracekv.vllm.context_attention import Asking, LayerCall
from gracekv.vllm.context_batch import ContextBatch, Division, plan_batch
from gracekv.vllm.stored_context import StoredContext
from gracekv.vllm.triton_kernel import attend_units, merge_units

# Target number of programs per multiprocessor; more than run at once, since heads are uneven.
# Source: ours.
_PROGRAMS = 4
# The largest query tile that does not spill registers with two loops, by padded head dimension.
_LARGEST = {128: 32, 256: 16}
# Entries or tokens that justify a program of their own. Source: ours.
_ENTRIES = 256
# Numbers of query rows that select each of the kernel's tiles.
_TILES = (1, 17, 33)


def plan_gpu_batch(
    asking: Mapping[int, Asking], metadata: Any, group: int, pages: Tensor
) -> ContextBatch:
    """The step's work over contexts, on the device of `pages` [blocks, G, block, 2d].

    The other arguments are those of `plan_batch`.
    """
    of_context: Counter[str] = Counter()
    for context, tokens in asking.values():
        of_context[context.header.digest] += tokens * group
    capability, rows = gpu.capability(pages.device), max(of_context.values())
    tile = unit_tile(pages.shape[3] // 2, pages.dtype, capability, rows)
    programs = _PROGRAMS * gpu.processors(pages.device)
    return plan_batch(asking, metadata, group, pages, Division(tile.queries, _ENTRIES, programs))


@functools.cache
def unit_tile(dim: int, dtype: torch.dtype, capability: tuple[int, int], rows: int) -> Tiles:
    """The kernel's tile; cached, since every layer calls it.

    Args:
        dim: d.
        dtype: dtype of queries, keys and values.
        capability: capability of the GPU, (major, minor).
        rows: maximum query rows that share a context, or the rows of the largest unit; both lead
            to the same tile.

    Raises `BackendUnavailableError` for a dtype or dimension that the kernel does not support.
    """
    return tiles(dim, dtype, capability, min(rows, _LARGEST.get(padded_dim(dim), rows)))


def warm_up(pages: Tensor, group: int) -> None:
    """Compile the kernels for an engine's pages: attend to a context of one entry.

    Args:
        pages: [blocks, G, block, 2d]; block 0 is read.
        group: query heads per KV head.
    """
    heads, dim, device = pages.shape[1], pages.shape[3] // 2, pages.device
    entries = torch.zeros(heads, dim, dtype=pages.dtype, device=device)
    ones = torch.zeros(heads, device=device, dtype=torch.float32)
    layer = RaggedEntries(entries, entries, ones.int(), ones, torch.arange(heads + 1, device="cpu"))
    header: Any = SimpleNamespace(digest="")
    context = StoredContext.of(header, (layer,))
    for tokens in sorted({-(-rows // group) for rows in _TILES}):
        metadata = SimpleNamespace(
            query_start_loc=torch.tensor([0, tokens], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
            block_table=torch.zeros(1, tokens, dtype=torch.int32, device=device),
            max_seq_len=tokens,
            num_actual_tokens=tokens,
        )
        batch = plan_gpu_batch({0: Asking(context, tokens)}, metadata, group, pages)
        query = pages.new_zeros(tokens, heads * group, dim)
        attend(batch, 0, LayerCall(None, query, pages, metadata, torch.empty_like(query)), 1.0)


def attend(batch: ContextBatch, layer: int, call: LayerCall, scale: float) -> None:
    """Write each token's row of `call.output`: attention over its context and its pages so far.

    Args:
        batch: the tokens and their contexts.
        layer: index of the model's layer.
        call: the layer's call; pages hold keys before values, and only their last stride is fixed.
        scale: factor of q . k.

    Log multiplicities are added to the logits; sums are in float32.
    """
    query, pages, output = call.query, call.kv_cache, call.output
    blocks = call.metadata.block_table
    query_heads, dim = query.shape[1:]
    heads, block = pages.shape[1:3]
    tile = unit_tile(dim, pages.dtype, gpu.capability(pages.device), batch.longest)
    block_d = padded_dim(dim)
    # The interpreter treats the bits of bfloat16 as integers, and truncates instead of rounding; so
    # there the kernel writes float32, and torch rounds.
    upcast = gpu.interpreted() and query.dtype == torch.bfloat16
    target = output.float() if upcast else output
    part_output = query.new_empty((batch.slots, query_heads, dim), dtype=torch.float32)
    part_lse = query.new_empty((batch.slots, query_heads), dtype=torch.float32)
    work = (batch.units, batch.addresses, layer, len(batch.contexts))
    tokens = (batch.places, batch.positions, batch.rows, batch.first_slot)
    query_args = (query, *query.stride()[:2])
    page_args = (pages, *pages.stride()[:3], blocks, blocks.stride(0))
    result = (target, *target.stride()[:2])
    sizes = {"D": dim, "BLOCK_D": block_d, "enable_fp_fusion": True}
    with torch.cuda.device_of(query):
        attend_units[(len(batch.units), heads)](
            *(*work, *tokens, *query_args, *page_args, *result),
            *(part_output, part_lse, scale, query_heads),
            GROUP=query_heads // heads, BLOCK=block, BLOCK_M=tile.queries, BLOCK_N=tile.keys,
            UPCAST=upcast, PRECISION=tile.precision, num_warps=tile.warps, num_stages=tile.stages,
            **sizes,
        )  # fmt: skip
        if batch.merged:
            parts = (part_output, part_lse, batch.first_slot, batch.places, *result, query_heads)
            merge_units[(batch.merged, query_heads)](*parts, BLOCK_S=merge_step(block_d), **sizes)
    if upcast:
        output.copy_(target)
