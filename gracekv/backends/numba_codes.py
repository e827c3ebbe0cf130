"""Quantised rows as float32 numbers, for the kernel of the `numba` backend.

Rows are dequantised into a scratch array that stays in the processor's cache, as rows in half
precision are: from memory only codes, scales and zero points are read. Heads and groups of whole
vectors (`code_vectors`) are dequantised by vector instructions, others one number at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.code_vectors import (
    high_by_channel,
    high_by_token,
    low_by_channel,
    low_by_token,
    whole_by_channel,
    whole_by_token,
)
from gracekv.kernels.intrinsics import as_float32, pointer
from gracekv.kernels.row_vectors import WIDTH


@njit(nogil=True)  # type: ignore[untyped-decorator]
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
    """wide[:count] <- `count` quantised rows of one head.

    Args:
        half: an array of the numbers that scales and zero points are.
        parts: `CodedArgs`.
        part: which coded part it is, counted from 1.
        of_keys: whether keys are asked for, or values.
        row: of the part, the head's.
        first: index of the first one in the part.
        count: of rows.
        wide: float32 [count or more, d].
        s: float32 [1, count * d or more] for scales; overwritten, as is `z`.
        z: for zero points.
    """
    p, dim = parts[part - 1], wide.shape[1]
    codes = codes_of(parts, part, of_keys, dim)
    scales, zeros = scales_of(half, parts, part, of_keys, dim)
    if p.keys_by_channel if of_keys else p.values_by_channel:
        inside, block = place_of(parts, part, row, first)
        _by_channel(
            codes, scales, zeros, p.bits, p.group_size, inside, block, first, count, wide, s, z
        )
    else:
        _by_token(codes, scales, zeros, p.bits, first, count, wide, s, z)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def codes_of(parts: Any, part: int, of_keys: bool, dim: int) -> Any:
    """uint8 [E, bytes]: what is read from memory for rows of the coded part `part`."""
    p = parts[part - 1]
    address = p.key_codes if of_keys else p.value_codes
    return carray(pointer(address), (p.entries, dim * p.bits // 8), np.uint8)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def scales_of(half: Any, parts: Any, part: int, of_keys: bool, dim: int) -> Any:
    """Scales and zero points of the coded part `part`, [N, d] by channel, else [E, C]."""
    p = parts[part - 1]
    if of_keys:
        scale, zero, by_channel = p.key_scale, p.key_zero, p.keys_by_channel
    else:
        scale, zero, by_channel = p.value_scale, p.value_zero, p.values_by_channel
    shape = (p.block_count, dim) if by_channel else (p.entries, p.columns)
    return (
        carray(pointer(scale), shape, half.dtype),
        carray(pointer(zero), shape, half.dtype),
    )


@njit(nogil=True)  # type: ignore[untyped-decorator]
def place_of(parts: Any, part: int, row: int, first: int) -> Any:
    """The place of entry `first` in its head, row `row` of the part, and the head's first block."""
    p = parts[part - 1]
    begin = carray(pointer(p.offsets), row + 1, np.int64)[row]
    return first - begin, carray(pointer(p.blocks), row + 1, np.int64)[row]


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def _by_channel(
    codes: Any,
    scale: Any,
    zero: Any,
    bits: int,
    size: int,
    inside: int,
    block: int,
    first: int,
    count: int,
    wide: Any,
    s: Any,
    z: Any,
) -> None:
    """wide[e] <- zero + scale * code for rows in blocks of `size`.

    `inside` is the place of the first row in its head, `block` the head's first block.
    """
    dim = wide.shape[1]
    half, step = dim // 2, codes.shape[1]
    done = 0
    while done < count:
        own = (inside + done) // size
        _widened(scale, (block + own) * dim, dim, s)
        _widened(zero, (block + own) * dim, dim, z)
        stop = min(count, (own + 1) * size - inside)
        at, to, rows = (first + done) * step, done * dim, stop - done
        if bits == 8 and dim % WIDTH == 0:
            for c in range(0, dim, WIDTH):
                whole_by_channel(codes, at + c, step, s, z, c, 0, wide, to + c, dim, rows)
        elif bits == 4 and half % WIDTH == 0:
            for c in range(0, half, WIDTH):
                low_by_channel(codes, at + c, step, s, z, c, 0, wide, to + c, dim, rows)
            for c in range(half, dim, WIDTH):
                high_by_channel(codes, at + c - half, step, s, z, c, 0, wide, to + c, dim, rows)
        else:
            for e in range(done, stop):
                for c in range(dim):
                    wide[e, c] = z[0, c] + s[0, c] * _code(codes, first + e, c, bits, half)
        done = stop


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def _by_token(
    codes: Any,
    scale: Any,
    zero: Any,
    bits: int,
    first: int,
    count: int,
    wide: Any,
    s: Any,
    z: Any,
) -> None:
    """wide[e] <- zero + scale * code for rows with scales of their own."""
    dim, groups = wide.shape[1], scale.shape[1]
    half, width, step = dim // 2, dim // groups, codes.shape[1]
    _widened(scale, first * groups, count * groups, s)
    _widened(zero, first * groups, count * groups, z)
    at = first * step
    if width % WIDTH == 0 and bits == 8:
        for c in range(0, dim, WIDTH):
            g = c // width
            whole_by_token(codes, at + c, step, s, z, g, groups, wide, c, dim, count)
    elif width % WIDTH == 0 and half % WIDTH == 0:
        for c in range(0, half, WIDTH):
            g = c // width
            low_by_token(codes, at + c, step, s, z, g, groups, wide, c, dim, count)
        for c in range(half, dim, WIDTH):
            g = c // width
            high_by_token(codes, at + c - half, step, s, z, g, groups, wide, c, dim, count)
    else:
        for e in range(count):
            for c in range(dim):
                g = e * groups + c // width
                wide[e, c] = z[0, g] + s[0, g] * _code(codes, first + e, c, bits, half)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _widened(numbers: Any, first: int, count: int, out: Any) -> None:
    """out[0, i] <- number first + i of the 16-bit `numbers`, in the order in which they lie."""
    begin = numbers.ctypes.data + numbers.itemsize * first
    as_float32(carray(pointer(begin), (1, count), numbers.dtype), 0, 1, out)


@njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _code(codes: Any, e: int, c: int, bits: int, half: int) -> Any:
    """Code c of row e as float32."""
    if bits == 8:
        return np.float32(codes[e, c])
    byte = codes[e, c % half]
    return np.float32(byte >> 4 if c >= half else byte & 15)
