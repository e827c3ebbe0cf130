"""Quantised rows as float32 numbers, for the kernel of the `numba` backend.

The rows of a split are dequantised into a scratch array that stays in the processor's cache, as
rows in half precision are: from memory only codes, scales and zero points are read. Loops are
plain pairs over rows and channels: for such a pair the compiler checks once, and not for each row,
that the arrays do not overlap, without which it would not use vector instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types  # type: ignore[import-untyped,unused-ignore]
from numba.extending import overload  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.half_precision import as_float32


def stored_rows(
    rows: Any, coded: Any, is_coded: bool, args: Any, row: int, first: int, count: int, wide: Any
) -> Any:
    """`count` rows of one head as float32: the array that holds them, and the first one's index.

    Args:
        rows: [E, d] in the layer's dtype; see `as_float32`.
        coded: None if nothing is quantised; else codes uint8 [E', bytes], scales and zero points
            (see `as_float32`), whether they are grouped by channel, offsets and block offsets.
        is_coded: whether the rows are quantised.
        args: `AttentionArgs`.
        row: of the quantised rows, the head's.
        first: index of the first one.
        count: of rows.
        wide: float32 [count or more, d] for rows that are not float32.
    """
    raise NotImplementedError("Only compiled code can call this; see `_typed`.")


@overload(stored_rows)  # type: ignore[untyped-decorator]
def _typed(
    rows: Any, coded: Any, is_coded: Any, args: Any, row: Any, first: Any, count: Any, wide: Any
) -> Any:
    def plain(
        rows: Any, coded: Any, is_coded: Any, args: Any, row: Any, first: Any, count: Any, wide: Any
    ) -> Any:
        return as_float32(rows, first, count, wide)

    def either(
        rows: Any, coded: Any, is_coded: Any, args: Any, row: Any, first: Any, count: Any, wide: Any
    ) -> Any:
        if not is_coded:
            return as_float32(rows, first, count, wide)
        codes, scale, zero, by_channel, offsets, blocks = coded
        if by_channel != 0:
            inside, block = first - offsets[row], blocks[row]
            _by_channel(
                codes, scale, zero, args.bits, args.group_size, inside, block, first, count, wide
            )
        else:
            _by_token(codes, scale, zero, args.bits, first, count, wide)
        return wide, 0

    return plain if isinstance(coded, types.NoneType) else either


def rows_or_codes(rows: Any, coded: Any) -> Any:
    """What is read from memory for quantised rows: their codes, or `rows` where `coded` is None."""
    raise NotImplementedError("Only compiled code can call this; see `_read`.")


@overload(rows_or_codes)  # type: ignore[untyped-decorator]
def _read(rows: Any, coded: Any) -> Any:
    def plain(rows: Any, coded: Any) -> Any:
        return rows

    def codes(rows: Any, coded: Any) -> Any:
        return coded[0]

    return plain if isinstance(coded, types.NoneType) else codes


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
) -> None:
    """wide[e] <- zero + scale * code for rows in blocks of `size`.

    `inside` is the place of the first row in its head, `block` the head's first block.
    """
    dim, half = wide.shape[1], wide.shape[1] // 2
    wide_scale, wide_zero = np.empty((1, dim), np.float32), np.empty((1, dim), np.float32)
    done = 0
    while done < count:
        own = (inside + done) // size
        as_float32(scale, block + own, 1, wide_scale)
        as_float32(zero, block + own, 1, wide_zero)
        s, z = wide_scale[0], wide_zero[0]
        rows = min(count, (own + 1) * size - inside) - done
        source, target = codes[first + done : first + done + rows], wide[done : done + rows]
        if bits == 8:
            for e in range(rows):
                for i in range(dim):
                    target[e, i] = z[i] + s[i] * np.float32(np.int32(source[e, i]))
        else:
            for e in range(rows):
                for i in range(half):
                    target[e, i] = z[i] + s[i] * np.float32(np.int32(source[e, i] & 15))
            for e in range(rows):
                for i in range(half):
                    code = np.float32(np.int32(source[e, i] >> 4))
                    target[e, half + i] = z[half + i] + s[half + i] * code
        done += rows


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def _by_token(
    codes: Any, scale: Any, zero: Any, bits: int, first: int, count: int, wide: Any
) -> None:
    """wide[e] <- zero + scale * code for rows with scales of their own."""
    dim, columns = wide.shape[1], scale.shape[1]
    half, width = dim // 2, dim // columns
    s, z = np.empty((count, columns), np.float32), np.empty((count, columns), np.float32)
    as_float32(scale, first, count, s)
    as_float32(zero, first, count, z)
    source, target = codes[first : first + count], wide[:count]
    if bits == 8:
        for e in range(count):
            for i in range(dim):
                target[e, i] = np.float32(np.int32(source[e, i]))
    else:
        for e in range(count):
            for i in range(half):
                target[e, i] = np.float32(np.int32(source[e, i] & 15))
        for e in range(count):
            for i in range(half):
                target[e, half + i] = np.float32(np.int32(source[e, i] >> 4))
    groups, steps, zeros = target.reshape(-1, width), s.reshape(-1), z.reshape(-1)
    for g in range(len(groups)):
        for i in range(width):
            groups[g, i] = zeros[g] + steps[g] * groups[g, i]
