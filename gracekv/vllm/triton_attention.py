"""Attention of a step's tokens over their contexts and vLLM's pages: launches the Triton kernels.

Importing this module imports triton.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gracekv.backends.triton_tiles import padded_dim
from gracekv.cache.base import RaggedEntries
from gracekv.kernels.device import interpreted
from gracekv.vllm.context_attention import Asking, LayerCall
from gracekv.vllm.context_batch import ContextBatch
from gracekv.vllm.gpu_batch import device_tile, plan_gpu_batch
from gracekv.vllm.stored_context import StoredContext
from gracekv.vllm.triton_kernel import attend_units, merge_units

# Numbers that the merging program holds at once; its step over slots follows from it.
_MERGE_TILE = 2048
# Query rows that lead to each of the kernel's tiles.
_TILES = (1, 17, 33)


def warm_up(pages: Tensor, group: int) -> None:
    """Compile the kernels for an engine's pages by a few tokens about a context of one entry.

    Args:
        pages: [blocks, G, block, 2d]; block 0 is read.
        group: query heads of a KV head.
    """
    heads, dim, device = pages.shape[1], pages.shape[3] // 2, pages.device
    entries = torch.zeros(heads, dim, dtype=pages.dtype, device=device)
    ones = torch.zeros(heads, device=device)
    layer = RaggedEntries(entries, entries, ones.int(), ones, torch.arange(heads + 1))
    header: Any = SimpleNamespace(digest="")
    context = StoredContext(header, (layer,))
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
        call = LayerCall(None, query, pages, metadata, torch.empty_like(query))
        attend(batch, 0, call, 1.0)


def attend(batch: ContextBatch, layer: int, call: LayerCall, scale: float) -> None:
    """Write each token's row of `call.output`: it over its context and its pages up to itself.

    Args:
        batch: the tokens and their contexts.
        layer: index of the model's layer.
        call: of that layer; its pages hold keys before values, with any strides but the last.
        scale: factor of q . k.

    Log multiplicities are added to the logits; sums are in float32.
    """
    query, pages, output = call.query, call.kv_cache, call.output
    blocks = call.metadata.block_table
    query_heads, dim = query.shape[1:]
    heads, block = pages.shape[1:3]
    tile = device_tile(pages.device, dim, pages.dtype, batch.longest)
    block_d = padded_dim(dim)
    # The interpreter computes on the bits of bfloat16 as if they were integers, and truncates
    # where it should round; so there the kernel writes float32, and torch rounds.
    upcast = interpreted() and query.dtype == torch.bfloat16
    written = output.float() if upcast else output
    part_output = query.new_empty((batch.slots, query_heads, dim), dtype=torch.float32)
    part_lse = query.new_empty((batch.slots, query_heads), dtype=torch.float32)
    with torch.cuda.device_of(query):
        attend_units[(len(batch.units), heads)](
            batch.units,
            batch.addresses,
            layer,
            len(batch.contexts),
            batch.places,
            batch.positions,
            batch.rows,
            batch.first_slot,
            query,
            query.stride(0),
            query.stride(1),
            pages,
            pages.stride(0),
            pages.stride(1),
            pages.stride(2),
            blocks,
            blocks.stride(0),
            written,
            written.stride(0),
            written.stride(1),
            part_output,
            part_lse,
            scale,
            query_heads,
            GROUP=query_heads // heads,
            D=dim,
            BLOCK_D=block_d,
            BLOCK=block,
            BLOCK_M=tile.queries,
            BLOCK_N=tile.keys,
            UPCAST=upcast,
            PRECISION=tile.precision,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if batch.merged:
            merge_units[(batch.merged, query_heads)](
                part_output,
                part_lse,
                batch.first_slot,
                batch.places,
                written,
                written.stride(0),
                written.stride(1),
                query_heads,
                D=dim,
                BLOCK_D=block_d,
                BLOCK_S=max(8, _MERGE_TILE // block_d),
            )
    if upcast:
        output.copy_(written)
