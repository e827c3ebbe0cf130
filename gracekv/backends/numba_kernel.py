"""One token's attention over ragged heads and a tail in one compiled pass, for CPUs.

Every thread runs the same function and takes its next split from a shared counter, which balances
threads of different speed. A split is a few entries of one head with that head's queries: each key
and each value is read from memory once; values are prefetched while keys are multiplied, and keys
of the next split while values are mixed. The thread that finishes the last split of a head merges
its partial results, in the order of the splits. A partial result depends on its split alone, so
results are equal to the bit on any number of threads.

Needs numba (`pip install "gracekv[cpu]"`); importing this module compiles nothing.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types  # type: ignore[import-untyped,unused-ignore]

from gracekv.backends import attention_args, numba_codes, numba_products
from gracekv.backends.attention_args import AttentionArgs
from gracekv.backends.numba_codes import rows_or_codes, stored_rows
from gracekv.backends.numba_products import mixtures, products
from gracekv.kernels import cap_logits as capping
from gracekv.kernels import exponential, half_precision, intrinsics
from gracekv.kernels.cap_logits import cap_logits
from gracekv.kernels.exponential import LEAST, exponential_parts
from gracekv.kernels.intrinsics import fetch_and_add, pointer
from gracekv.kernels.source_digest import digest

_ARGS = np.dtype(AttentionArgs)
_NO_SINK = np.float32(-math.inf)
_LOWEST = np.finfo(np.float32).min


@njit(nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def exponentials(x: Any, count: int, top: Any, bits: Any, power: Any) -> Any:
    """Sum of x <- e^(x - top), in place, for x <= top; `power` is `bits` (int32) as float32."""
    for e in range(count):
        y = max(x[e] - top, LEAST)
        mantissa, bits[e] = exponential_parts(y)
        # An entry that a bias of -inf hides has weight 0.
        x[e] = np.float32(0) if y == LEAST else mantissa
    total = np.float32(0)
    for e in range(count):
        x[e] *= power[e]
        total += x[e]
    return total


@njit(nogil=True)  # type: ignore[untyped-decorator]
def merge(
    partial: Any, slots: Any, count: int, output: Any, at: int, sink: float = -math.inf
) -> None:
    """output[at] from a query's `count` partial results; 0 if they hold no visible entry.

    `sink` is a logit to add to the denominator, -inf for none.
    """
    dim = output.shape[1]
    output[at] = np.float32(0)
    top = partial[slots[0], dim]
    for p in range(1, count):
        top = max(top, partial[slots[p], dim])
    if top == -math.inf:
        return
    total = np.float32(0)
    if sink > -math.inf:
        top = max(top, sink)
        total = np.float32(math.exp(sink - top))
    for p in range(count):
        factor = np.float32(math.exp(partial[slots[p], dim] - top))
        total += factor * partial[slots[p], dim + 1]
        for i in range(dim):
            output[at, i] += factor * partial[slots[p], i]
    for i in range(dim):
        output[at, i] /= total


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _run_splits(
    args: Any,
    keys: Any,
    values: Any,
    tail_keys: Any,
    tail_values: Any,
    coded_keys: Any,
    coded_values: Any,
) -> None:
    """Take splits from the shared counter until none is left; for codes see `stored_rows`."""
    dim, heads, group, tail_splits = args.dim, args.heads, args.group, args.tail_splits
    sequences, all_queries = args.rows // heads, args.batch * heads * group
    bias = carray(pointer(args.bias), (args.entries,), np.float32)
    mask = carray(pointer(args.mask), (args.batch * args.tail,), np.float32)
    coded_bias = carray(pointer(args.coded_bias), (args.coded_entries,), np.float32)
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

    scratch = np.empty((args.longest, dim), np.float32)
    queries = np.empty((args.most_queries, dim), np.float32)
    weights = np.empty((args.most_queries, args.longest), np.float32)
    bits = np.empty(args.longest, np.int32)
    power, mantissa = bits.view(np.float32), np.empty(args.longest, np.float32)
    slots = np.empty(args.packed_splits + tail_splits, np.int64)
    key_codes, value_codes = rows_or_codes(keys, coded_keys), rows_or_codes(values, coded_values)

    all_splits = args.packed_splits + args.batch * heads * tail_splits
    upcoming = fetch_and_add(counters, 0)
    while upcoming < all_splits:
        split, upcoming = upcoming, fetch_and_add(counters, 0)
        place = split - args.packed_splits
        is_coded = place < 0 and splits[split, 4] != 0
        if place < 0:
            row, first, stop, slot = (
                splits[split, 0], splits[split, 1], splits[split, 2], splits[split, 3],
            )  # fmt: skip
            sequence, head = row // heads, row % heads
            begin, end = sequence_start[sequence], sequence_start[sequence + 1]
            k_rows, v_rows, added_from = keys, values, first
            added = coded_bias if is_coded else bias
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
        entries, count = stop - first, 0
        for c in range(begin, end):
            for j in range(group):
                of = (continuations[c] * heads + head) * group + j
                for i in range(dim):
                    queries[count, i] = scale * query[of, i]
                count += 1

        k, at = stored_rows(k_rows, coded_keys, is_coded, args, row, first, entries, scratch)
        if is_coded:
            products(queries, count, k, at, entries, value_codes, first, weights)
        else:
            products(queries, count, k, at, entries, v_rows, first, weights)
        for j in range(count):
            if softcap > 0:
                cap_logits(weights[j], entries, softcap, mantissa, bits, power)
            if place < 0 or args.mask != 0:
                for e in range(entries):
                    weights[j, e] += added[added_from + e]
            top = weights[j, 0]
            for e in range(1, entries):
                top = max(top, weights[j, e])
            partial[slot + j, dim] = top
            # Where all entries are hidden any finite maximum will do: the weights are 0.
            total = exponentials(weights[j], entries, max(top, _LOWEST), bits, power)
            partial[slot + j, dim + 1] = total
        v, at = stored_rows(v_rows, coded_values, is_coded, args, row, first, entries, scratch)
        # Tails are short and often still in the processor's cache; their keys are not prefetched.
        ahead = splits[upcoming, 1] if upcoming < args.packed_splits else first
        if is_coded:
            mixtures(weights, count, v, at, entries, key_codes, ahead, partial[slot:])
        else:
            mixtures(weights, count, v, at, entries, keys, ahead, partial[slot:])

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


SOURCES = (
    attention_args,
    capping,
    exponential,
    half_precision,
    intrinsics,
    numba_codes,
    numba_products,
)
"""Modules beside this one that its compiled functions come from."""

# The numba type of rows of a dtype (see `half_precision`).
_NUMBERS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}


@functools.cache
def attend(dtype: torch.dtype, *, coded: bool = False) -> Any:
    """The kernel for a dtype of keys and values: a C callback on the address of `AttentionArgs`.

    `coded`: some entries are quantised. The first call on a machine compiles for some seconds;
    later ones load the result from disk.
    """
    number, sources = _NUMBERS[dtype], digest(*SOURCES)
    # Scales and zero points of float32 layers are float16 numbers.
    half = np.int16 if number is np.float32 else number

    def kernel(address: Any) -> None:
        _ = sources
        args = carray(address, (1,), _ARGS)[0]
        packed, tails = (args.entries, args.dim), (args.batch * args.heads * args.tail, args.dim)
        keys = carray(pointer(args.keys), packed, number)
        values = carray(pointer(args.values), packed, number)
        tail_keys = carray(pointer(args.tail_keys), tails, number)
        tail_values = carray(pointer(args.tail_values), tails, number)
        _run_splits(args, keys, values, tail_keys, tail_values, None, None)

    def coded_kernel(address: Any) -> None:
        _ = sources
        args = carray(address, (1,), _ARGS)[0]
        packed, tails = (args.entries, args.dim), (args.batch * args.heads * args.tail, args.dim)
        keys = carray(pointer(args.keys), packed, number)
        values = carray(pointer(args.values), packed, number)
        tail_keys = carray(pointer(args.tail_keys), tails, number)
        tail_values = carray(pointer(args.tail_values), tails, number)
        codes = (args.coded_entries, args.dim * args.bits // 8)
        offsets = carray(pointer(args.offsets), (args.rows + 1,), np.int64)
        blocks = carray(pointer(args.blocks), (args.rows + 1,), np.int64)
        by_channel, by_token = (args.coded_blocks, args.dim), (args.coded_entries, args.columns)
        groups = by_channel if args.keys_by_channel else by_token
        coded_keys = (
            carray(pointer(args.key_codes), codes, np.uint8),
            carray(pointer(args.key_scale), groups, half),
            carray(pointer(args.key_zero), groups, half),
            args.keys_by_channel, offsets, blocks,
        )  # fmt: skip
        groups = by_channel if args.values_by_channel else by_token
        coded_values = (
            carray(pointer(args.value_codes), codes, np.uint8),
            carray(pointer(args.value_scale), groups, half),
            carray(pointer(args.value_zero), groups, half),
            args.values_by_channel, offsets, blocks,
        )  # fmt: skip
        _run_splits(args, keys, values, tail_keys, tail_values, coded_keys, coded_values)

    return cfunc(types.void(types.voidptr), cache=True)(coded_kernel if coded else kernel)
