"""The two products of attention over quantised rows, for the kernel of the `numba` backend.

Keys by channel and values by token, the usual grouping, are multiplied as they are stored: scales
and zero points go into queries and weights (`code_matmul`). Rows of other groupings are
dequantised first (`numba_codes`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

from gracekv.backends.numba_codes import coded_rows, codes_of, place_of, scales_of, widened
from gracekv.kernels.code_matmul import MOST, dot_codes, mix_codes, scaled
from gracekv.kernels.code_vectors import separate_four, separate_two, widen_one
from gracekv.kernels.intrinsics import prefetch
from gracekv.kernels.numba_products import mixtures, products
from gracekv.kernels.row_vectors import WIDTH

# Keys to prefetch in a split, and values of a round, as in `numba_products`.
_PREFETCH_KEYS = 12
_ROUND = 32


@njit(nogil=True)  # type: ignore[untyped-decorator]
def coded_products(
    queries: Any,
    count: int,
    half: Any,
    parts: Any,
    part: int,
    row: int,
    first: int,
    entries: int,
    out: Any,
    to: int,
    folded: Any,
    base: Any,
    wide: Any,
    s: Any,
    z: Any,
) -> None:
    """out[j, to + e] = q_j . k_e for quantised keys of one head; prefetches the values' codes.

    Args:
        queries: float32 [count or more, d].
        count: of queries.
        half: see `coded_rows`, as for the next four and the last three.
        parts: `CodedArgs`.
        part: which one, counted from 1.
        row: of the part, the head's.
        first: index of the first key in the part.
        entries: of keys.
        out: float32 [count or more, to + entries or more].
        to: see above.
        folded: float32 [count or more, d or more], overwritten, as are the next ones.
        base: float32 [1, count or more].
        wide: float32 [entries or more, d].
        s: float32 [1, entries * d or more].
        z: likewise.
    """
    p, dim = parts[part - 1], wide.shape[1]
    ahead = codes_of(parts, part, False, dim)
    if not p.keys_by_channel or p.group_size % 4 or dim * p.bits % (8 * WIDTH):
        coded_rows(half, parts, part, True, row, first, entries, wide, s, z)
        products(queries, count, wide, 0, entries, ahead, first, out, to)
        return
    codes = codes_of(parts, part, True, dim)
    scale, zero = scales_of(half, parts, part, True, dim)
    v_scale, v_zero = scales_of(half, parts, part, False, dim)
    inside, block = place_of(parts, part, row, first)
    step, stride, columns = codes.shape[1], folded.shape[1], out.shape[1]
    done = 0
    while done < entries:
        own = (inside + done) // p.group_size
        stop = min(entries, (own + 1) * p.group_size - inside)
        whole = done + (stop - done) // 4 * 4
        prefetch(scale, block + own + 1, 1)
        prefetch(zero, block + own + 1, 1)
        if not p.values_by_channel:
            prefetch(v_scale, first + done, stop - done)
            prefetch(v_zero, first + done, stop - done)
        widened(scale, (block + own) * dim, dim, s)
        widened(zero, (block + own) * dim, dim, z)
        _centred(s, z, 0, dim, p.bits)
        for j in range(count):
            base[0, j] = scaled(queries, j * dim, s, z, 0, dim, folded, j * stride)
        for e in range(done, whole, 4):
            prefetch(ahead, first + e, 4)
            prefetch(codes, first + e + _PREFETCH_KEYS, 4)
            at = (first + e) * step
            for j in range(0, count, MOST):
                q, target = j * stride, j * columns + to + e
                dot_codes(
                    p.bits, count - j, folded, q, stride, codes, at, step, dim, base, j, out,
                    target, columns,
                )  # fmt: skip
        if whole < stop:
            coded_rows(half, parts, part, True, row, first + whole, stop - whole, wide, s, z)
            products(queries, count, wide, 0, stop - whole, ahead, first + whole, out, to + whole)
        done = stop


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def coded_mixtures(
    weights: Any,
    count: int,
    half: Any,
    parts: Any,
    part: int,
    row: int,
    first: int,
    entries: int,
    at: int,
    out: Any,
    start: int,
    folded: Any,
    wide: Any,
    s: Any,
    z: Any,
) -> None:
    """out[j, :d] = sum_e w_je v_e for quantised values of one head; prefetches keys' codes.

    Args:
        weights: float32 [count or more, start + entries or more].
        count: of queries.
        half: see `coded_products`, as for what is not named here.
        parts: `CodedArgs`.
        part: which one, counted from 1.
        row: of the part, the head's.
        first: index of the first value in the part.
        entries: of values.
        at: the first of as many keys to prefetch.
        out: float32 [count or more, d or more].
        start: the first weight's place; where that is not 0, the sum is added to `out`.
        folded: float32 [count or more, entries * d / 16 or more].
        wide: float32 [entries or more, d].
        s: float32 [1, entries * d or more].
        z: likewise.
    """
    p, dim = parts[part - 1], wide.shape[1]
    ahead, groups = codes_of(parts, part, True, dim), p.columns
    width, room = dim // groups, wide.shape[0]
    if p.values_by_channel or dim % (2 * WIDTH) or width % WIDTH or groups not in (1, 2, 4):
        coded_rows(half, parts, part, False, row, first, entries, wide, s, z)
        mixtures(weights, count, wide, 0, entries, ahead, at, out, start)
        return
    codes = codes_of(parts, part, False, dim)
    scale, zero = scales_of(half, parts, part, False, dim)
    _separated(scale, first, entries, groups, s, room)
    _separated(zero, first, entries, groups, z, room)
    whole, columns = entries // WIDTH * WIDTH, out.shape[1]
    stride, step = folded.shape[1], codes.shape[1]
    for g in range(groups):
        _centred(s, z, g * room, entries, p.bits)
        for j in range(count):
            w, f = j * weights.shape[1] + start, j * stride + g * room
            total = scaled(weights, w, s, z, g * room, whole, folded, f)
            for e in range(whole, entries):
                weight = weights[j, start + e]
                folded[j, g * room + e] = weight * s[0, g * room + e]
                total += weight * z[0, g * room + e]
            own = out[j, g * width : (g + 1) * width]
            for c in range(width):
                own[c] = total + (own[c] if start else np.float32(0))
    # A pair of vectors at a time: neighbours of 8 bits, both halves of bytes of 4.
    apart = WIDTH if p.bits == 8 else dim // 2
    pairs = dim // 2 // WIDTH
    for e in range(0, entries, _ROUND):
        rows = min(_ROUND, entries - e)
        prefetch(ahead, at + e, rows)
        for pair in range(pairs):
            c = pair * WIDTH * (2 if p.bits == 8 else 1)
            one, other = c // width * room + e, (c + apart) // width * room + e
            code = (first + e) * step + c
            for j in range(0, count, MOST):
                f, target = j * stride, j * columns + c
                mix_codes(
                    p.bits, count - j, folded, f + one, f + other, stride, codes, code, step, rows,
                    out, target, apart, columns,
                )  # fmt: skip


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def _centred(s: Any, z: Any, first: int, count: int, bits: int) -> None:
    """Zero points of codes 0 <- those of the middle of their range."""
    middle = np.float32(128 if bits == 8 else 8)
    scale, zero = s[0, first : first + count], z[0, first : first + count]
    for i in range(count):
        zero[i] += middle * scale[i]


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _separated(numbers: Any, first: int, count: int, groups: int, out: Any, room: int) -> None:
    """out[0, g room + e] <- the 16-bit number of entry first + e and group g; 1, 2 or 4 groups."""
    done, begin = count // WIDTH * WIDTH, first * groups
    if groups == 1:
        widened(numbers, begin, count, out)
        return
    for e in range(0, done, WIDTH):
        if groups == 2:
            separate_two(numbers, begin + e * 2, out, e, room)
        else:
            separate_four(numbers, begin + e * 4, out, e, room)
    for e in range(done, count):
        for g in range(groups):
            widen_one(numbers, begin + e * groups + g, out, g * room + e)
