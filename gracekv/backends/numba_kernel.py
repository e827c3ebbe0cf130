"""One token's attention over ragged heads and a tail in one compiled pass, for CPUs.

Every thread runs the same function and takes its next split from a shared counter, which balances
threads of different speed. A split is a few entries of one head with that head's queries: each key
and each value is read from memory once; values are prefetched while keys are multiplied, and keys
of the next split while values are mixed. The thread that finishes the last split of a head merges
its partial results in the order of the splits. A partial result depends only on its split, so
results are bitwise equal for any number of threads.

Needs numba (`pip install "gracekv[cpu]"`); importing this module compiles nothing.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types  # type: ignore[import-untyped,unused-ignore]

from gracekv.backends import attention_args, numba_codes
from gracekv.backends.attention_args import AttentionArgs, CodedArgs
from gracekv.backends.numba_codes import coded_rows, codes_of
from gracekv.kernels import intrinsics, numba_products, numba_softmax, row_vectors
from gracekv.kernels.compiled import cached
from gracekv.kernels.intrinsics import NUMBERS, as_float32, digest, fetch_and_add, inner, pointer
from gracekv.kernels.numba_products import mixtures, products
from gracekv.kernels.numba_softmax import cap_logits, exponentials, largest, merge
from gracekv.kernels.row_vectors import WIDTH

_ARGS, _PART = np.dtype(AttentionArgs), np.dtype(CodedArgs)
# Number of elements converted at a time, so that they stay in the nearest cache.
_PIECENUMBERS = 4096
_NO_SINK = np.float32(-math.inf)
_LOWEST = np.finfo(np.float32).min


@inner()
def _floats(begin: int, rows: int, columns: int) -> Any:
    """float32 [rows, columns] at address `begin`, and the cache line after it.

    The array does not own memory: numba counts references to arrays that do, with locked
    instructions that took a tenth of a step.
    """
    size = (rows * columns + WIDTH - 1) // WIDTH * WIDTH * 4
    return carray(pointer(begin), (rows, columns), np.float32), begin + size


@inner()
def _run_splits(
    args: Any, keys: Any, values: Any, tail_keys: Any, tail_values: Any, half: Any
) -> None:
    """Take splits from the shared counter until none is left; for `half` see `coded_rows`."""
    dim, heads, group, tail_splits = args.dim, args.heads, args.group, args.tail_splits
    sequences, all_queries = args.rows // heads, args.batch * heads * group
    bias = carray(pointer(args.bias), (args.entries,), np.float32)
    mask = carray(pointer(args.mask), (args.batch * args.tail,), np.float32)
    parts = carray(pointer(args.parts), (args.part_count,), _PART)
    splits = carray(pointer(args.splits), (args.packed_splits, 5), np.int64)
    row_splits = carray(pointer(args.row_splits), (args.rows + 1,), np.int64)
    sequence_start = carray(pointer(args.sequence_start), (sequences + 1,), np.int64)
    continuations = carray(pointer(args.continuations), (args.batch,), np.int64)
    sequence_of = carray(pointer(args.sequence_of), (args.batch,), np.int64)
    query = carray(pointer(args.query), (all_queries, dim), np.float32)
    output = carray(pointer(args.output), (all_queries, dim), np.float32)
    all_slots = args.packed_slots + all_queries * tail_splits
    partial = carray(pointer(args.partial), (all_slots, dim + 2), np.float32)
    sink_logits = carray(pointer(args.sink_logits), (heads * group,), np.float32)
    counters, scale = pointer(args.counters), np.float32(args.scale)
    softcap = np.float32(args.softcap)

    piece = max(4, _PIECENUMBERS // dim // 4 * 4)
    most, longest = args.most_queries, args.longest
    work = np.empty(3 * piece * dim + most * (2 * dim + longest) + 7 * WIDTH, np.float32)
    free = (work.ctypes.data + 4 * WIDTH - 1) // (4 * WIDTH) * (4 * WIDTH)
    scratch, free = _floats(free, piece, dim)
    s, free = _floats(free, 1, piece * dim)
    z, free = _floats(free, 1, piece * dim)
    queries, free = _floats(free, most, dim)
    mixed, free = _floats(free, most, dim)
    weights, free = _floats(free, most, longest)
    slots = np.empty(args.packed_splits + tail_splits, np.int64)

    all_splits = args.packed_splits + args.batch * heads * tail_splits
    upcoming = fetch_and_add(counters, 0)
    while upcoming < all_splits:
        split, upcoming = upcoming, fetch_and_add(counters, 0)
        place = split - args.packed_splits
        stored = splits[split, 4] if place < 0 else 0
        if place < 0:
            row, slot = splits[split, 0], splits[split, 3]
            first, stop = splits[split, 1], splits[split, 2]
            sequence, head = row // heads, row % heads
            begin, end = sequence_start[sequence], sequence_start[sequence + 1]
            k_rows, v_rows, added_from = keys, values, first
            added = bias
            if stored != 0:
                p = parts[stored - 1]
                added = carray(pointer(p.bias), (p.entries,), np.float32)
        else:
            part, of = place % tail_splits, place // tail_splits
            begin, head = of // heads, of % heads
            end, sequence = begin + 1, sequence_of[begin]
            row, slot = sequence * heads + head, args.packed_slots + place * group
            start = part * args.longest
            base = continuations[begin] * args.tail_batch + head * args.tail_head
            first, stop = base + start, base + min(start + args.longest, args.tail)
            added_from = continuations[begin] * args.tail + start
            k_rows, v_rows, added = tail_keys, tail_values, mask
        entries, count = stop - first, np.int64(0)
        # A slice, since the compiler would gather numbers if an index might be negative.
        extra = added[added_from : added_from + entries]
        for c in range(begin, end):
            for j in range(group):
                of = (continuations[c] * heads + head) * group + j
                for i in range(dim):
                    queries[count, i] = scale * query[of, i]
                count += 1

        for start in range(0, entries, piece):
            n, begins = min(piece, entries - start), first + start
            if stored != 0:
                coded_rows(half, parts, stored, True, row, begins, n, scratch, s, z)
                coming = codes_of(parts, stored, False, dim)
                products(queries, count, scratch, 0, n, coming, begins, weights, start)
            else:
                k, at = as_float32(k_rows, begins, n, scratch)
                products(queries, count, k, at, n, v_rows, begins, weights, start)
        for j in range(count):
            if softcap > 0:
                cap_logits(weights[j], entries, softcap)
            if place < 0 or args.mask != 0:
                for e in range(entries):
                    weights[j, e] += extra[e]
            top = largest(weights[j], entries)
            partial[slot + j, dim] = top
            # If all entries are hidden, any finite maximum works: the weights are 0.
            partial[slot + j, dim + 1] = exponentials(weights[j], entries, max(top, _LOWEST))
        # Tails are short and often still in the processor's cache, so their keys are not
        # prefetched.
        ahead = splits[upcoming, 1] if upcoming < args.packed_splits else first
        for start in range(0, entries, piece):
            n, begins = min(piece, entries - start), first + start
            if stored != 0:
                coded_rows(half, parts, stored, False, row, begins, n, scratch, s, z)
                coming = codes_of(parts, stored, True, dim)
                mixtures(weights, count, scratch, 0, n, coming, ahead + start, mixed, start)
            else:
                v, at = as_float32(v_rows, begins, n, scratch)
                mixtures(weights, count, v, at, n, keys, ahead + start, mixed, start)
        for j in range(count):
            for i in range(dim):
                partial[slot + j, i] = mixed[j, i]

        begin, end = sequence_start[sequence], sequence_start[sequence + 1]
        packed = row_splits[row + 1] - row_splits[row]
        finished = fetch_and_add(counters, 1 + row) + 1
        if finished < packed + (end - begin) * tail_splits:
            continue
        for c in range(begin, end):
            for j in range(group):
                for p in range(packed):
                    slots[p] = splits[row_splits[row] + p, 3] + (c - begin) * group + j
                for p in range(tail_splits):
                    of = (c * heads + head) * tail_splits + p
                    slots[packed + p] = args.packed_slots + of * group + j
                of = (continuations[c] * heads + head) * group + j
                sink = sink_logits[head * group + j] if args.sink_logits != 0 else _NO_SINK
                merge(partial, slots, packed + tail_splits, output, of, sink)
    # Its views hold no reference, so it must live until here.
    work[0] = 0


# Other modules that its compiled functions come from.
_SOURCES = (attention_args, intrinsics, numba_codes, numba_products, numba_softmax, row_vectors)


@cache
def attend(dtype: torch.dtype) -> Any:
    """The kernel for a dtype of keys and values: a C callback on the address of `AttentionArgs`.

    The first call on a machine compiles for several seconds; later ones load the result from disk.
    """
    number, sources = NUMBERS[dtype], digest(*_SOURCES)
    # Scales and zero points of float32 layers are float16.
    half_number = np.int16 if number is np.float32 else number

    def kernel(address: Any) -> None:
        _ = sources
        args = carray(address, (1,), _ARGS)[0]
        keys = carray(pointer(args.keys), (args.entries, args.dim), number)
        values = carray(pointer(args.values), (args.entries, args.dim), number)
        # A tail is a view of larger storage; its last row is that of the last head.
        before = (args.batch - 1) * args.tail_batch + (args.heads - 1) * args.tail_head
        tails = before + args.tail, args.dim
        tail_keys = carray(pointer(args.tail_keys), tails, number)
        tail_values = carray(pointer(args.tail_values), tails, number)
        _run_splits(args, keys, values, tail_keys, tail_values, carray(address, (0,), half_number))

    return cached(partial(cfunc, types.void(types.voidptr)), kernel)
