"""Attention of a step's tokens over their contexts and vLLM's pages: calls the compiled kernel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gracekv.kernels import omp_threads
from gracekv.vllm.batch import ContextBatch
from gracekv.vllm.page_layout import PageLayout


def warm_up(dtype: torch.dtype) -> None:
    """Compile what `attend` runs for contexts of `dtype`."""
    from gracekv.vllm.numba_kernel import merge_kernel, work_kernel

    work_kernel(dtype)
    merge_kernel()


def attend(
    batch: ContextBatch,
    layer: int,
    query: Tensor,
    pages: Tensor,
    blocks: Tensor,
    layout: PageLayout,
    scale: float,
) -> Tensor:
    """[n, H, d] in the query's dtype: each token over its context and its own pages up to itself.

    Args:
        batch: n tokens and their contexts.
        layer: index of the model's layer.
        query: [all tokens of the step, H, d].
        pages: [blocks, G, block, 2d] as vLLM holds them; heads and their parts contiguous.
        blocks: int32 [R, most blocks of a row], the block table.
        layout: where keys and values lie in a block.
        scale: factor of q . k.

    Log multiplicities are added to the logits; sums are in float32.
    """
    from gracekv.vllm.numba_kernel import PagedArgs, merge_kernel, work_kernel

    count, (heads, block) = len(batch.tokens), pages.shape[1:3]
    query_heads, dim = query.shape[1:]
    chosen = query[batch.tokens].float().contiguous()
    output = torch.empty_like(chosen)
    slots = int(batch.first_slot[-1])
    partial = torch.empty(slots * query_heads, dim + 2)
    counters = (ctypes.c_int64 * 2)()
    args = PagedArgs(
        work=batch.work.data_ptr(),
        units=len(batch.work),
        contexts=batch.addresses[layer].data_ptr(),
        context_count=len(batch.contexts),
        positions=batch.positions.data_ptr(),
        rows=batch.rows.data_ptr(),
        first_slot=batch.first_slot.data_ptr(),
        tokens=count,
        slots=slots,
        blocks=blocks.data_ptr(),
        table_rows=blocks.shape[0],
        block_stride=blocks.stride(0),
        pages=pages.data_ptr(),
        page_elements=pages.stride(0) * pages.shape[0],
        page_stride=pages.stride(0),
        head_stride=pages.stride(1),
        block=block,
        key_places=layout.keys.data_ptr(),
        value_places=layout.values.data_ptr(),
        query=chosen.data_ptr(),
        output=output.data_ptr(),
        partial=partial.data_ptr(),
        counters=ctypes.addressof(counters),
        longest=batch.longest,
        heads=heads,
        group=query_heads // heads,
        dim=dim,
        scale=scale,
    )
    omp_threads.run(work_kernel(pages.dtype), ctypes.addressof(args))
    omp_threads.run(merge_kernel(), ctypes.addressof(args))
    return output.to(query.dtype)
