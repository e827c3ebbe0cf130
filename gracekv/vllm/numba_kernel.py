"""Attention of a step's tokens over ragged contexts and vLLM's own pages, compiled for CPUs.

One call serves all requests of a step, whatever their contexts: threads take units of work (see
`gracekv.vllm.context_batch`) from a shared counter. A unit reads its entries once, in short pieces,
for all its queries together, and keeps a running maximum and sum (online softmax). The thread that
finishes the last unit of a query row merges its partial results, in the order of their slots.
Results are bitwise identical for any number of threads.

Needs numba (`pip install "gracekv[cpu]"`); importing this module compiles nothing.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels import intrinsics, numba_products, numba_softmax, row_vectors
from gracekv.kernels.compiled import argument_fields, cached
from gracekv.kernels.intrinsics import NUMBERS, as_float32, digest, fetch_and_add, inner, pointer
from gracekv.kernels.numba_products import mixtures, products
from gracekv.kernels.numba_softmax import exponentials, largest, merge

_PIECE = 256  # entries at once; ours
# Modules that the compiled functions come from.
_SOURCES = (intrinsics, numba_products, numba_softmax, row_vectors)


class PagedArgs(ctypes.Structure):
    """Arguments of the kernel: addresses of contiguous arrays, and sizes.

    Fields, with n tokens, G KV heads, q query heads of each, W units of work, S slots:
        work: int64 [W, 6], units as in `ContextBatch`.
        contexts: int64 [C, 4], addresses of keys [E, d], values [E, d], log multiplicities float32
            [E] and offsets int64 [G + 1].
        positions, rows: int64 [n].
        first_slot: int64 [n + 1].
        blocks: int32, the block table, rows of `block_stride`.
        pages: block b, head g begins at element b * page_stride + g * head_stride.
        key_places, value_places: int32 [block, d].
        query, output: float32 [n, G, q, d].
        partial: float32 [S * G * q, d + 2]: output, maximum and sum.
        counters: int64 [1 + n G q] zeros: units taken so far, and finished ones of each query row.
        longest: maximum query rows of a unit.
    """

    _fields_ = argument_fields(
        "work units contexts context_count positions rows first_slot tokens slots blocks "
        "table_rows block_stride pages page_elements page_stride head_stride block key_places "
        "value_places query output partial counters longest heads group dim",
        "scale",
    )


_ARGS = np.dtype(PagedArgs)
_LOWEST = np.finfo(np.float32).min


@inner()
def _add(weights: Any, count: int, entries: int, v: Any, at: int, mixed: Any, sums: Any) -> None:
    """Add a piece of logits `weights` and values `v` to partial results `sums` [count, d + 2]."""
    dim = v.shape[1]
    for j in range(count):
        top = max(largest(weights[j], entries), sums[j, dim])
        if sums[j, dim] != -math.inf and sums[j, dim] < top:
            factor = np.float32(math.exp(sums[j, dim] - top))
            for i in range(dim):
                sums[j, i] *= factor
            sums[j, dim + 1] *= factor
        sums[j, dim] = top
        # If all entries are hidden, any finite maximum will do: the weights are 0.
        sums[j, dim + 1] += exponentials(weights[j], entries, max(top, _LOWEST))
    mixtures(weights, count, v, at, entries, v, at, mixed)
    for j in range(count):
        for i in range(dim):
            sums[j, i] += mixed[j, i]


@inner()
def _gather(pages: Any, base: int, first: int, count: int, places: Any, rows: Any) -> None:
    """rows[e] <- slot first + e of the block and head that begin at `base`."""
    for e in range(count):
        for i in range(rows.shape[1]):
            rows[e, i] = pages[base + places[first + e, i]]


@inner()
def _run_work(args: Any, like: Any) -> None:
    """Take units of work from the first counter until there are none left; `like`: a page."""
    dim, heads, group, block = args.dim, args.heads, args.group, args.block
    work = carray(pointer(args.work), (args.units, 6), np.int64)
    contexts = carray(pointer(args.contexts), (args.context_count, 4), np.int64)
    positions = carray(pointer(args.positions), (args.tokens,), np.int64)
    rows = carray(pointer(args.rows), (args.tokens,), np.int64)
    first_slot = carray(pointer(args.first_slot), (args.tokens + 1,), np.int64)
    blocks = carray(pointer(args.blocks), (args.table_rows, args.block_stride), np.int32)
    key_places = carray(pointer(args.key_places), (block, dim), np.int32)
    value_places = carray(pointer(args.value_places), (block, dim), np.int32)
    query = carray(pointer(args.query), (args.tokens * heads * group, dim), np.float32)
    partial = carray(pointer(args.partial), (args.slots * heads * group, dim + 2), np.float32)
    output = carray(pointer(args.output), (args.tokens * heads * group, dim), np.float32)
    counters, scale = pointer(args.counters), np.float32(args.scale)

    most = args.longest
    scratch = np.empty((_PIECE, dim), np.float32)
    page_keys = np.empty((_PIECE, dim), like.dtype)
    page_values = np.empty_like(page_keys)
    queries, mixed = np.empty((most, dim), np.float32), np.empty((most, dim), np.float32)
    sums, weights = np.empty((most, dim + 2), np.float32), np.empty((most, _PIECE), np.float32)
    rows_of = np.empty(max(1, args.slots), np.int64)

    item = fetch_and_add(counters, 0)
    while item < args.units * heads:
        unit, head = item // heads, item % heads
        context, reads_pages = work[unit, 0], work[unit, 1]
        first, count = work[unit, 2], work[unit, 3]
        part, parts = work[unit, 4], work[unit, 5]
        for j in range(count):
            of = ((first + j) // group * heads + head) * group + (first + j) % group
            for i in range(dim):
                queries[j, i] = scale * query[of, i]
        sums[:count] = np.float32(0)
        sums[:count, dim] = -math.inf
        if context >= 0:
            offsets = carray(pointer(contexts[context, 3]), (heads + 1,), np.int64)
            begin, length = offsets[head], offsets[head + 1] - offsets[head]
            stop = begin + length * (part + 1) // parts
            begin += length * part // parts
            keys = carray(pointer(contexts[context, 0]), (offsets[heads], dim), like.dtype)
            values = carray(pointer(contexts[context, 1]), (offsets[heads], dim), like.dtype)
            bias = carray(pointer(contexts[context, 2]), (offsets[heads],), np.float32)
            while begin < stop:
                entries = min(_PIECE, stop - begin)
                k, at = as_float32(keys, begin, entries, scratch)
                products(queries, count, k, at, entries, values, begin, weights)
                for j in range(count):
                    for e in range(entries):
                        weights[j, e] += bias[begin + e]
                v, at = as_float32(values, begin, entries, scratch)
                _add(weights, count, entries, v, at, mixed, sums)
                begin += entries
        if reads_pages:
            row, reach = rows[first // group], positions[(first + count - 1) // group] + 1
            stop = reach * (part + 1) // parts
            begin = reach * part // parts
            while begin < stop:
                inside = begin % block
                entries = min(_PIECE, min(block - inside, stop - begin))
                base = blocks[row, begin // block] * args.page_stride + head * args.head_stride
                _gather(like, base, inside, entries, key_places, page_keys)
                _gather(like, base, inside, entries, value_places, page_values)
                k, at = as_float32(page_keys, 0, entries, scratch)
                products(queries, count, k, at, entries, page_values, 0, weights)
                for j in range(count):
                    visible = positions[(first + j) // group] + 1 - begin
                    for e in range(max(visible, 0), entries):
                        weights[j, e] = -math.inf
                v, at = as_float32(page_values, 0, entries, scratch)
                _add(weights, count, entries, v, at, mixed, sums)
                begin += entries
        for j in range(count):
            token, query_head = (first + j) // group, head * group + (first + j) % group
            of = token * heads * group + query_head
            if context >= 0 and reads_pages:
                rows_of[0] = j
                merge(sums, rows_of, 1, output, of)
                continue
            start, end = first_slot[token], first_slot[token + 1]
            slot = part + (start if context >= 0 else end - parts)
            for i in range(dim + 2):
                partial[slot * heads * group + query_head, i] = sums[j, i]
            if fetch_and_add(counters, 1 + of) + 1 == end - start:
                for p in range(end - start):
                    rows_of[p] = (start + p) * heads * group + query_head
                merge(partial, rows_of, end - start, output, of)
        item = fetch_and_add(counters, 0)


@cache
def work_kernel(dtype: torch.dtype) -> Any:
    """The kernel for contexts and pages of a dtype: a C callback on the address of `PagedArgs`.

    The first call on a machine compiles for a few seconds; later ones load the result from disk.
    """
    number, sources = NUMBERS[dtype], digest(*_SOURCES)

    def kernel(address: Any) -> None:
        _ = sources
        args = carray(address, (1,), _ARGS)[0]
        _run_work(args, carray(pointer(args.pages), (args.page_elements,), number))

    return cached(partial(cfunc, types.void(types.voidptr)), kernel)
