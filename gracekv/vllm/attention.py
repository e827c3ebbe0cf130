"""Attention of a step's tokens over their contexts and vLLM's pages, on CPUs.

Runs a compiled kernel on the plan of the step. The layout of keys and values in a page is found by
writing numbers into one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.errors import ShapeError
from gracekv.kernels.addresses import address
from gracekv.kernels.compiled import on_all_threads
from gracekv.vllm.context_attention import LayerCall
from gracekv.vllm.context_batch import ContextBatch, Division
from gracekv.vllm.numba_kernel import PagedArgs, work_kernel

DIVISION = Division(rows=96, entries=1024, programs=512)
"""The size of units of work; results do not depend on the number of threads. Source: ours."""

# Digits that every dtype holds exactly.
_BASE = 128


@dataclass(frozen=True, slots=True, eq=False)
class PageLayout:
    """The layout of one head's part of one block, in elements from its start.

    Attributes:
        keys: int32 [block, d], the place of feature i of the key in slot t.
        values: int32 [block, d].
    """

    keys: Tensor
    values: Tensor


def find_layout(write: Callable[[Tensor, Tensor, Tensor], None], page: Tensor) -> PageLayout:
    """Find the layout that `write` uses; kernels for different processors pack keys differently.

    Args:
        write: takes keys [block, G, d], values [block, G, d] and `page`, and fills the page as the
            engine would.
        page: zeros [1, G, block, 2d], contiguous.

    Raises `ShapeError` if the filled page does not hold every number once.

    Source: ours.
    """
    _, heads, block, width = page.shape
    dim = width // 2
    numbers = torch.arange(1, block * width + 1)
    order = torch.zeros(block * width, dtype=torch.int64)
    place = 1
    while place <= block * width:
        digits = (numbers // place % _BASE).to(page.dtype).view(2, block, 1, dim)
        keys, values = digits.expand(2, block, heads, dim).contiguous().unbind()
        write(keys, values, page.zero_())
        flat = page.view(heads, -1)
        if not bool((flat == flat[0]).all()):
            raise ShapeError("The heads of the engine's pages have different layouts.")
        order += flat[0].long() * place
        place *= _BASE
    if not torch.equal(order.sort().values, numbers):
        raise ShapeError("The engine's pages hold no plain keys and values (a quantised cache?).")
    where = order.argsort().to(torch.int32).view(2, block, dim)
    return PageLayout(where[0].contiguous(), where[1].contiguous())


def attend(
    batch: ContextBatch, layer: int, call: LayerCall, layout: PageLayout, scale: float
) -> None:
    """Write each token's row of `call.output`: attention over its context and its pages so far.

    Args:
        batch: n tokens and their contexts.
        layer: index of the model's layer.
        call: the layer's call; in its pages, each head's part of a block is contiguous.
        layout: layout of keys and values in a block.
        scale: factor of q . k.

    Log multiplicities are added to the logits; sums are in float32.
    """
    pages, blocks = call.kv_cache, call.metadata.block_table.contiguous()
    heads, block = pages.shape[1:3]
    query_heads, dim = call.query.shape[1:]
    query = call.query[batch.places].float().contiguous()
    tokens, output = len(query), torch.empty_like(query)
    partial = torch.empty(batch.slots * query_heads, dim + 2, dtype=torch.float32)
    counters = torch.zeros(1 + tokens * query_heads, dtype=torch.int64)
    int32, int64, float32 = torch.int32, torch.int64, torch.float32
    contexts = len(batch.contexts)
    # Blocks and heads may lie apart; a head's part of a block may not.
    address("pages", pages[0, 0], pages.dtype, block, 2 * dim)
    for context in batch.contexts:
        entries = context.layers[layer]
        address("context", entries.keys, pages.dtype, entries.entries, dim)
        address("context's offsets", entries.offsets, int64, heads + 1)
    args = PagedArgs(
        work=address("work", batch.units, int64, len(batch.units), 6),
        contexts=address("contexts", batch.addresses[layer], int64, contexts, 4),
        positions=address("positions", batch.positions, int64, tokens),
        rows=address("rows", batch.rows, int64, tokens),
        first_slot=address("first_slot", batch.first_slot, int64, tokens + 1),
        blocks=address("blocks", blocks, int32, *blocks.shape),
        key_places=address("key_places", layout.keys, int32, block, dim),
        value_places=address("value_places", layout.values, int32, block, dim),
        query=address("query", query, float32, tokens, query_heads, dim),
        output=address("output", output, float32, tokens, query_heads, dim),
        partial=address("partial", partial, float32, batch.slots * query_heads, dim + 2),
        counters=address("counters", counters, int64, 1 + tokens * query_heads),
        units=len(batch.units), context_count=contexts, tokens=tokens, slots=batch.slots,
        table_rows=blocks.shape[0], block_stride=blocks.shape[1], pages=pages.data_ptr(),
        page_elements=pages.stride(0) * pages.shape[0], page_stride=pages.stride(0),
        head_stride=pages.stride(1), block=block, longest=batch.longest, heads=heads,
        group=query_heads // heads, dim=dim, scale=scale,
    )  # fmt: skip
    on_all_threads(work_kernel(pages.dtype), ctypes.addressof(args))
    call.output[batch.places] = output.to(call.output.dtype)
