"""Quantised rows as float32 numbers, for the kernel of the `numba` backend.

Rows are dequantised into a scratch array that stays in the processor's cache, like rows in half
precision: only codes, scales and zero points are read from memory. Heads and groups of whole
vectors are dequantised by vector operations, which every processor has in some width: loops over
the channels of one head are too short for a compiler to vectorise well. Others, and codes of 2
bits, are dequantised one number at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped,unused-ignore]
from numba import carray, types  # type: ignore[import-untyped,unused-ignore]
from numba.core import cgutils  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.intrinsics import as_float32, emitted, inner, pointer
from gracekv.kernels.row_vectors import FLOATS, WIDTH, broadcast, multiply_add, vector_at

_INTS = ir.VectorType(ir.IntType(32), WIDTH)


def _all(number: int) -> Any:
    return ir.Constant(_INTS, [number] * WIDTH)


def _decoder(half: str, *, by_channel: bool) -> Any:
    number = types.int64
    given = (None, number, number, None, None, number, number, None, number, number, number)

    @emitted(types.void, *given)
    def decode(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        codes, at, step, scale, zero, place, stride, out, to, width, rows = arguments
        pair = ((kinds[3], scale), (kinds[4], zero))

        def read(row: Any) -> list[Any]:
            index = builder.add(place, builder.mul(row, stride))
            if by_channel:
                places = [vector_at(context, builder, k, x, index) for k, x in pair]
                return [builder.load(found, align=4) for found in places]
            data = [context.make_array(k)(context, builder, x).data for k, x in pair]
            return [broadcast(builder, builder.load(builder.gep(x, [index]))) for x in data]

        shared = read(ir.Constant(ir.IntType(64), 0))
        with cgutils.for_range(builder, rows) as loop:
            s, z = shared if by_channel else read(loop.index)
            index = builder.add(at, builder.mul(loop.index, step))
            kind = ir.VectorType(ir.IntType(8), WIDTH)
            found = vector_at(context, builder, kinds[0], codes, index, kind)
            code = builder.zext(builder.load(found, align=1), _INTS)
            if half == "low":
                code = builder.and_(code, _all(15))
            elif half == "high":
                code = builder.lshr(code, _all(4))
            numbers = multiply_add(builder, builder.sitofp(code, FLOATS), s, z)
            index = builder.add(to, builder.mul(loop.index, width))
            builder.store(numbers, vector_at(context, builder, kinds[7], out, index), align=4)

    return decode


# out[to + r width + i] = zero + scale * code for i = 0, ..., 15 and r below `rows`, the codes from
# the 16 bytes from `at` + r `step` on: whole bytes, their low halves or their high halves. Scale
# and zero point are 16 numbers from `place` on, the same for all rows ("channel"), or one number,
# at `place` + r `stride` ("token").
_HALVES = ("whole", "low", "high")
whole_by_channel, low_by_channel, high_by_channel = (_decoder(x, by_channel=True) for x in _HALVES)
whole_by_token, low_by_token, high_by_token = (_decoder(x, by_channel=False) for x in _HALVES)


@inner(fastmath={"contract"})
def coded_rows(
    half: Any,
    parts: Any,
    part: int,
    of_keys: bool,
    row: int,
    first: int,
    count: int,
    wide: Any,
    s: Any,
    z: Any,
) -> None:
    """wide[:count] <- zero + scale * code of `count` quantised rows of one head.

    Args:
        half: an array of the type of scales and zero points.
        parts: `CodedArgs`.
        part: number of the coded part, counted from 1.
        of_keys: True for keys, False for values.
        row: the head's row in the part.
        first: index of the first row in the part.
        count: number of rows.
        wide: float32 [count or more, d].
        s: float32 [1, count * d or more] for scales; overwritten, as is `z`.
        z: for zero points.
    """
    p, dim = parts[part - 1], wide.shape[1]
    codes = codes_of(parts, part, of_keys, dim)
    scale = p.key_scale if of_keys else p.value_scale
    zero = p.key_zero if of_keys else p.value_zero
    # Scales per row, and scales of all rows.
    groups = dim if of_keys else p.columns
    numbers = groups * (p.block_count if of_keys else p.entries)
    scales = carray(pointer(scale), (numbers,), half.dtype)
    zeros = carray(pointer(zero), (numbers,), half.dtype)
    # The index of the first row in its head, and the head's first block.
    inside = first - carray(pointer(p.offsets), row + 1, np.int64)[row]
    block = carray(pointer(p.blocks), row + 1, np.int64)[row]
    step, width, middle = codes.shape[1], dim // groups, dim // 2
    in_vectors = p.bits > 2 and step % WIDTH == 0 and (of_keys or width % WIDTH == 0)
    done = 0
    while done < count:
        # Rows of one block share their scales; rows with their own scales are processed all at
        # once.
        own = (inside + done) // p.group_size
        stop = min(count, (own + 1) * p.group_size - inside) if of_keys else count
        rows, begin = stop - done, groups * (block + own if of_keys else first)
        _widened(scales, begin, groups if of_keys else groups * rows, s)
        _widened(zeros, begin, groups if of_keys else groups * rows, z)
        at, to = (first + done) * step, done * dim
        if not in_vectors:
            for e in range(rows):
                for part_of_byte in range(8 // p.bits):
                    shift = part_of_byte * p.bits
                    for j in range(step):
                        c = part_of_byte * step + j
                        g = c if of_keys else e * groups + c // width
                        code = codes[first + done + e, j] >> shift & ((1 << p.bits) - 1)
                        wide[done + e, c] = z[0, g] + s[0, g] * np.float32(code)
        elif of_keys:
            for c in range(0, step, WIDTH):
                if p.bits == 8:
                    whole_by_channel(codes, at + c, step, s, z, c, 0, wide, to + c, dim, rows)
                else:
                    h = middle + c
                    low_by_channel(codes, at + c, step, s, z, c, 0, wide, to + c, dim, rows)
                    high_by_channel(codes, at + c, step, s, z, h, 0, wide, to + h, dim, rows)
        else:
            for c in range(0, step, WIDTH):
                g = c // width
                if p.bits == 8:
                    whole_by_token(codes, at + c, step, s, z, g, groups, wide, c, dim, rows)
                else:
                    h = middle + c
                    low_by_token(codes, at + c, step, s, z, g, groups, wide, c, dim, rows)
                    g = h // width
                    high_by_token(codes, at + c, step, s, z, g, groups, wide, h, dim, rows)
        done = stop


@inner()
def codes_of(parts: Any, part: int, of_keys: bool, dim: int) -> Any:
    """uint8 [E, bytes]: the codes that are read from memory for rows of the coded part `part`."""
    p = parts[part - 1]
    address = p.key_codes if of_keys else p.value_codes
    return carray(pointer(address), (p.entries, dim * p.bits // 8), np.uint8)


@inner()
def _widened(numbers: Any, first: int, count: int, out: Any) -> None:
    """out[0, i] <- number first + i of the 16-bit `numbers`, in memory order."""
    begin = numbers.ctypes.data + numbers.itemsize * first
    as_float32(carray(pointer(begin), (1, count), numbers.dtype), 0, 1, out)
