"""Attention of a step's tokens over their contexts and vLLM's pages, on CPUs.

What a step computes is planned once, the same for every layer; a compiled kernel runs it. Where
keys and values lie in a page is found by writing numbers into one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gracekv.errors import ShapeError
from gracekv.kernels import omp_threads
from gracekv.vllm.context_attention import LayerCall, pieces
from gracekv.vllm.stored_context import StoredContext

# Queries of a KV head that go over entries together. Source: ours.
_MOST_QUERIES = 96
# Entries of a head that one unit of work reads, if there are few queries. Source: ours.
_ENTRIES = 1024
# Digits that every dtype holds exactly.
_BASE = 128


@dataclass(frozen=True, slots=True, eq=False)
class ContextBatch:
    """The tokens of a step whose requests have a context, and the work that they are.

    A unit of work is a KV head and some tokens with either a range of a context's entries or the
    tokens' own pages; the results of a token's units are merged.

    Attributes:
        contexts: C contexts that occur.
        addresses: int64 [L, C, 4], of their tensors; see `StoredContext`.
        tokens: int64 [n], places in the step's tokens, those of a context together.
        positions: int64 [n], each token's place in its own sequence; it sees pages up to there.
        rows: int64 [n], the row of the block table.
        first_slot: int64 [n + 1], where the partial results of a token begin.
        work: int64 [W, 6]: context or -1 for pages, KV head, first of `tokens` and their number,
            which part of the head's entries, of how many.
        longest: the most tokens of a unit.
        covers_all: whether no other tokens are in the step.
    """

    contexts: tuple[StoredContext, ...]
    addresses: Tensor
    tokens: Tensor
    positions: Tensor
    rows: Tensor
    first_slot: Tensor
    work: Tensor
    longest: int
    covers_all: bool


def plan_batch(
    named: Mapping[int, StoredContext],
    first_blocks: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    group: int,
) -> ContextBatch | None:
    """The step's work over contexts; None if no request has one.

    Args:
        named: contexts of requests, by the first block of their pages.
        first_blocks: the first block of each row's pages.
        starts: R + 1 places in the step's tokens where each row's begin.
        lengths: tokens of each row's sequence so far, those of this step included.
        group: query heads of a KV head.
    """
    found = [(row, named[block]) for row, block in enumerate(first_blocks) if block in named]
    if not found:
        return None
    order = {context.header.digest: context for _, context in found}
    contexts = tuple(order.values())
    number = {digest: i for i, digest in enumerate(order)}
    found.sort(key=lambda pair: number[pair[1].header.digest])

    most = max(1, _MOST_QUERIES // group)
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    of_context = [0] * (len(contexts) + 1)
    pages: list[tuple[int, int]] = []
    for row, context in found:
        new = starts[row + 1] - starts[row]
        pages += pieces(len(tokens), new, most)
        tokens += range(starts[row], starts[row] + new)
        positions += range(lengths[row] - new, lengths[row])
        rows += [row] * new
        of_context[number[context.header.digest] + 1] += new

    heads = contexts[0].layers[0].heads
    work: list[tuple[int, int, int, int, int, int]] = []
    parts = np.empty(len(tokens), np.int64)
    for i, context in enumerate(contexts):
        of_context[i + 1] += of_context[i]
        count = of_context[i + 1] - of_context[i]
        tiles = pieces(of_context[i], count, most)
        # Many tokens are work enough for all threads.
        split = 1 if len(tiles) > 1 else -(-max(1, context.longest) // _ENTRIES)
        parts[of_context[i] : of_context[i + 1]] = split
        work += [
            (i, head, first, many, part, split)
            for first, many in tiles
            for part in range(split)
            for head in range(heads)
        ]
    work += [(-1, head, first, many, 0, 1) for first, many in pages for head in range(heads)]
    slots = np.concatenate([[0], np.cumsum(parts + 1)])
    return ContextBatch(
        contexts,
        torch.stack([context.addresses for context in contexts], dim=1),
        torch.tensor(tokens),
        torch.tensor(positions),
        torch.tensor(rows),
        torch.from_numpy(slots),
        torch.tensor(work),
        max(many for _, _, _, many, _, _ in work),
        len(tokens) == starts[-1],
    )


@dataclass(frozen=True, slots=True, eq=False)
class PageLayout:
    """Places inside one head's part of one block, counted in elements from its start.

    Attributes:
        keys: int32 [block, d], where feature i of the key in slot t lies.
        values: int32 [block, d].
    """

    keys: Tensor
    values: Tensor


def find_layout(write: Callable[[Tensor, Tensor, Tensor], None], page: Tensor) -> PageLayout:
    """The layout that `write` uses; kernels for different processors pack keys differently.

    Args:
        write: called with keys [block, G, d], values [block, G, d] and a page like `page`, which it
            fills as the engine would.
        page: zeros [1, G, block, 2d], contiguous.

    Raises `ShapeError` if the page then does not hold every number once.

    Source: ours.
    """
    _, heads, block, width = page.shape
    dim = width // 2
    numbers = torch.arange(1, block * width + 1)
    read = torch.zeros(block * width, dtype=torch.int64)
    place = 1
    while place <= block * width:
        digits = (numbers // place % _BASE).to(page.dtype).view(2, block, 1, dim)
        keys, values = digits.expand(2, block, heads, dim).contiguous().unbind()
        write(keys, values, page.zero_())
        flat = page.view(heads, -1)
        if not bool((flat == flat[0]).all()):
            raise ShapeError("The engine's pages are laid out differently in each head.")
        read += flat[0].long() * place
        place *= _BASE
    if not torch.equal(read.sort().values, numbers):
        raise ShapeError(
            "The engine's pages do not hold keys and values as they are (a quantised cache?)."
        )
    where = read.argsort().to(torch.int32).view(2, block, dim)
    return PageLayout(where[0].contiguous(), where[1].contiguous())


def warm_up(dtype: torch.dtype) -> None:
    """Compile what `attend` runs for contexts of `dtype`."""
    from gracekv.vllm.numba_kernel import merge_kernel, work_kernel

    work_kernel(dtype)
    merge_kernel()


def attend(
    batch: ContextBatch, layer: int, call: LayerCall, layout: PageLayout, scale: float
) -> None:
    """Write each token's row of `call.output`: it over its context and its pages up to itself.

    Args:
        batch: n tokens and their contexts.
        layer: index of the model's layer.
        call: of that layer; its pages have heads, and their parts, contiguous.
        layout: where keys and values lie in a block.
        scale: factor of q . k.

    Log multiplicities are added to the logits; sums are in float32.
    """
    from gracekv.vllm.numba_kernel import PagedArgs, merge_kernel, work_kernel

    pages, blocks = call.kv_cache, call.metadata.block_table
    count, (heads, block) = len(batch.tokens), pages.shape[1:3]
    query_heads, dim = call.query.shape[1:]
    chosen = call.query[batch.tokens].float().contiguous()
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
    call.output[batch.tokens] = output.to(call.output.dtype)
