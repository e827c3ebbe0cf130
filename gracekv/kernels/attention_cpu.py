"""One token's attention over ragged heads and a tail in one compiled pass, for CPUs.

All threads run the same function and fetch their next piece of work from one counter, so that a
thread that the machine holds up does less. A piece is a few entries of one head with the queries
of that head: each key and each value is read from memory once; values are fetched while keys are
multiplied, and the other way round. Whoever finishes the last piece of a head puts its pieces
together, in their order. What a piece gives depends on nothing but the piece, so that results are
the same to the bit on any number of threads.

Needs numba (`pip install "gracekv[cpu]"`); importing this module compiles nothing.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels import half_precision, intrinsics_cpu
from gracekv.kernels.half_precision import as_float32
from gracekv.kernels.intrinsics_cpu import fetch_and_add, pointer, prefetch
from gracekv.kernels.source_digest import digest


class Task(ctypes.Structure):
    """What the kernel is to do: addresses, all of contiguous arrays, and sizes.

    Fields, with E entries, Z = S * G rows of them, B continuations, n query heads a KV head, P
    pieces of packed entries, C pieces of each tail:
        keys, values: [E, d].
        bias: float32 [E].
        pieces: int64 [P, 4]: row, first and last + 1 entry, first slot; rows in order.
        row_pieces: int64 [Z + 1], the first piece of each row.
        member_start: int64 [S + 1], the first member of each sequence.
        members: int64 [B], continuations by sequence.
        sequence_of: int64 [B], the sequence of each member.
        query: float32 [B, G, n, d].
        tail_keys, tail_values: rows of d; the one of (b, g, s) is b * tail_batch + g * tail_head
            + s.
        mask: float32 [B, tail] to add to the tail's logits; 0 for none.
        partial: float32 [slots, d + 2] to work in: P pieces' queries, then [B, G, C, n] by member.
        output: float32 [B, G, n, d].
        counters: int64 [1 + Z] zeros: pieces fetched, and done of each row.
        longest: entries of a piece of a tail; no packed piece has more.
        widest: at least the queries of any row.
    """

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "keys", "values", "bias", "pieces", "row_pieces", "member_start", "members",
            "sequence_of", "query", "tail_keys", "tail_values", "mask", "partial", "output",
            "counters", "entries", "dim", "heads", "group", "rows", "batch", "packed_pieces",
            "packed_slots", "longest", "widest", "tail", "tail_pieces", "tail_batch", "tail_head",
        )),
        ("scale", ctypes.c_double),
    ]  # fmt: skip


_TASK = np.dtype(Task)
_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts, so that x - n ln 2 keeps its digits.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LEAST = np.float32(-87.0)
_LOWEST = np.finfo(np.float32).min
# Keys of the same piece to fetch before they are multiplied, for pieces that nobody has announced.
_OWN_AHEAD = 12


@njit(nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _products(
    queries: Any, count: int, keys: Any, first: int, entries: int, ahead: Any, at: int, out: Any
) -> None:
    """out[j, e] = q_j . k_e, four keys a round, while rows of `ahead` from `at` are fetched."""
    dim = keys.shape[1]
    e = 0
    while e + 4 <= entries:
        prefetch(ahead, at + e, 4)
        prefetch(keys, first + e + _OWN_AHEAD, 4)
        r = first + e
        for j in range(count):
            t0, t1, t2, t3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(dim):
                x = queries[j, i]
                t0 += x * keys[r, i]
                t1 += x * keys[r + 1, i]
                t2 += x * keys[r + 2, i]
                t3 += x * keys[r + 3, i]
            out[j, e], out[j, e + 1], out[j, e + 2], out[j, e + 3] = t0, t1, t2, t3
        e += 4
    prefetch(ahead, at + e, entries - e)
    while e < entries:
        for j in range(count):
            t0 = np.float32(0)
            for i in range(dim):
                t0 += queries[j, i] * keys[first + e, i]
            out[j, e] = t0
        e += 1


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def _mixtures(
    weights: Any, count: int, values: Any, first: int, entries: int, ahead: Any, at: int, out: Any
) -> None:
    """out[j, :d] = sum_e w_je v_e, four values a round, while `ahead` is fetched."""
    dim = values.shape[1]
    out[:count, :dim] = np.float32(0)
    e = 0
    while e + 4 <= entries:
        prefetch(ahead, at + e, 4)
        r = first + e
        for j in range(count):
            w0, w1, w2, w3 = weights[j, e], weights[j, e + 1], weights[j, e + 2], weights[j, e + 3]
            for i in range(dim):
                out[j, i] += (
                    w0 * values[r, i]
                    + w1 * values[r + 1, i]
                    + w2 * values[r + 2, i]
                    + w3 * values[r + 3, i]
                )
        e += 4
    while e < entries:
        for j in range(count):
            for i in range(dim):
                out[j, i] += weights[j, e] * values[first + e, i]
        e += 1


@njit(nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _exponentials(x: Any, count: int, top: Any, bits: Any, power: Any) -> Any:
    """Sum of x <- e^(x - top), in place, for x <= top; `power` is `bits` (int32) as float32."""
    for e in range(count):
        y = max(x[e] - top, _LEAST)
        n = np.floor(y * _LOG2_E + np.float32(0.5))
        r = (y - n * _LN2_HIGH) - n * _LN2_LOW
        s = np.float32(1.9875691500e-4)
        s = s * r + np.float32(1.3981999507e-3)
        s = s * r + np.float32(8.3334519073e-3)
        s = s * r + np.float32(4.1665795894e-2)
        s = s * r + np.float32(1.6666665459e-1)
        s = s * r + np.float32(5.0000001201e-1)
        # What a bias of -inf hides weighs nothing at all.
        x[e] = np.float32(0) if y == _LEAST else s * r * r + r + np.float32(1)
        bits[e] = (np.int32(n) + np.int32(127)) << np.int32(23)
    total = np.float32(0)
    for e in range(count):
        x[e] *= power[e]
        total += x[e]
    return total


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _combine(partial: Any, slots: Any, count: int, output: Any, at: int) -> None:
    """output[at] from a query's `count` partial results; 0 if it saw nothing."""
    dim = output.shape[1]
    output[at] = np.float32(0)
    top = partial[slots[0], dim]
    for p in range(1, count):
        top = max(top, partial[slots[p], dim])
    if top == -math.inf:
        return
    total = np.float32(0)
    for p in range(count):
        factor = np.float32(math.exp(partial[slots[p], dim] - top))
        total += factor * partial[slots[p], dim + 1]
        for i in range(dim):
            output[at, i] += factor * partial[slots[p], i]
    for i in range(dim):
        output[at, i] /= total


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _work(task: Any, keys: Any, values: Any, tail_keys: Any, tail_values: Any) -> None:
    """Fetch pieces until there are none left."""
    dim, heads, group, tail_pieces = task.dim, task.heads, task.group, task.tail_pieces
    sequences, queries_in_all = task.rows // heads, task.batch * heads * group
    bias = carray(pointer(task.bias), (task.entries,), np.float32)
    mask = carray(pointer(task.mask), (task.batch * task.tail,), np.float32)
    pieces = carray(pointer(task.pieces), (task.packed_pieces, 4), np.int64)
    row_pieces = carray(pointer(task.row_pieces), (task.rows + 1,), np.int64)
    member_start = carray(pointer(task.member_start), (sequences + 1,), np.int64)
    members = carray(pointer(task.members), (task.batch,), np.int64)
    sequence_of = carray(pointer(task.sequence_of), (task.batch,), np.int64)
    query = carray(pointer(task.query), (queries_in_all, dim), np.float32)
    output = carray(pointer(task.output), (queries_in_all, dim), np.float32)
    slots_in_all = task.packed_slots + queries_in_all * tail_pieces
    partial = carray(pointer(task.partial), (slots_in_all, dim + 2), np.float32)
    counters, scale = pointer(task.counters), np.float32(task.scale)

    wide = np.empty((task.longest, dim), np.float32)
    queries = np.empty((task.widest, dim), np.float32)
    weights = np.empty((task.widest, task.longest), np.float32)
    bits = np.empty(task.longest, np.int32)
    power = bits.view(np.float32)
    slots = np.empty(task.packed_pieces + tail_pieces, np.int64)

    in_all = task.packed_pieces + task.batch * heads * tail_pieces
    upcoming = fetch_and_add(counters, 0)
    while upcoming < in_all:
        piece, upcoming = upcoming, fetch_and_add(counters, 0)
        place = piece - task.packed_pieces
        if place < 0:
            row, first, stop, slot = (
                pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], pieces[piece, 3],
            )  # fmt: skip
            sequence, head = row // heads, row % heads
            opening, closing = member_start[sequence], member_start[sequence + 1]
            k_rows, v_rows, shift, shifted = keys, values, bias, first
        else:
            part, of = place % tail_pieces, place // tail_pieces
            opening, head = of // heads, of % heads
            closing, sequence = opening + 1, sequence_of[opening]
            row, slot = sequence * heads + head, task.packed_slots + place * group
            start = part * task.longest
            base = members[opening] * task.tail_batch + head * task.tail_head
            first, stop = base + start, base + min(start + task.longest, task.tail)
            shifted = members[opening] * task.tail + start
            k_rows, v_rows, shift = tail_keys, tail_values, mask
        entries, count = stop - first, 0
        for m in range(opening, closing):
            for j in range(group):
                of = (members[m] * heads + head) * group + j
                for i in range(dim):
                    queries[count, i] = scale * query[of, i]
                count += 1

        k, at = as_float32(k_rows, first, entries, wide)
        _products(queries, count, k, at, entries, v_rows, first, weights)
        for j in range(count):
            if place < 0 or task.mask != 0:
                for e in range(entries):
                    weights[j, e] += shift[shifted + e]
            top = weights[j, 0]
            for e in range(1, entries):
                top = max(top, weights[j, e])
            partial[slot + j, dim] = top
            # Where all is hidden any finite top will do: the weights are 0.
            total = _exponentials(weights[j], entries, max(top, _LOWEST), bits, power)
            partial[slot + j, dim + 1] = total
        v, at = as_float32(v_rows, first, entries, wide)
        # Tails are short, and often still near; their keys are not fetched ahead.
        ahead = pieces[upcoming, 1] if upcoming < task.packed_pieces else first
        _mixtures(weights, count, v, at, entries, keys, ahead, partial[slot:])

        opening, closing = member_start[sequence], member_start[sequence + 1]
        own = row_pieces[row + 1] - row_pieces[row]
        done = fetch_and_add(counters, 1 + row) + 1
        if done < own + (closing - opening) * tail_pieces:
            continue
        for m in range(opening, closing):
            for j in range(group):
                for p in range(own):
                    slots[p] = pieces[row_pieces[row] + p, 3] + (m - opening) * group + j
                for p in range(tail_pieces):
                    of = (m * heads + head) * tail_pieces + p
                    slots[own + p] = task.packed_slots + of * group + j
                of = (members[m] * heads + head) * group + j
                _combine(partial, slots, own + tail_pieces, output, of)


# What rows of a dtype are to numba (see `half_precision`).
_NUMBERS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}


@functools.cache
def attend(dtype: torch.dtype) -> Any:
    """The function for keys and values of a dtype: a C callback that takes a `Task`'s address.

    The first call on a machine compiles for some seconds; later ones find the result on disk.
    """
    number, sources = _NUMBERS[dtype], digest(half_precision, intrinsics_cpu)

    def body(address: Any) -> None:
        _ = sources
        task = carray(address, (1,), _TASK)[0]
        packed, tails = (task.entries, task.dim), (task.batch * task.heads * task.tail, task.dim)
        keys = carray(pointer(task.keys), packed, number)
        values = carray(pointer(task.values), packed, number)
        tail_keys = carray(pointer(task.tail_keys), tails, number)
        tail_values = carray(pointer(task.tail_values), tails, number)
        _work(task, keys, values, tail_keys, tail_values)

    return cfunc(types.void(types.voidptr), cache=True)(body)
