"""Products with codes that are not dequantised first, 16 channels at a time, for compiled kernels.

A key by channel is zero + scale * code, so q . key = q . zero + (q * scale) . code: scales go into
the query once a block. A value by token likewise takes its scale and zero point into its weight.
Codes are read as signed numbers around the middle of their range, -2^(bits - 1) first, which keeps
sums as small as those of dequantised numbers; zero points are those of the middle. Each vector of
codes is widened once for up to `MOST` queries. Indices count elements of contiguous arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped,unused-ignore]
from numba import types  # type: ignore[import-untyped,unused-ignore]
from numba.core import cgutils  # type: ignore[import-untyped,unused-ignore]
from numba.extending import intrinsic  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.row_vectors import (
    FLOATS,
    WIDTH,
    broadcast,
    multiply_add,
    pick,
    sums_of_four,
    vector_at,
)

MOST = 3
"""Queries of one call at most; their sums and the codes fit the registers of every processor."""

_INT = ir.IntType(64)
_BYTES = ir.VectorType(ir.IntType(8), WIDTH)
_INTS = ir.VectorType(ir.IntType(32), WIDTH)
_ZERO = ir.Constant(FLOATS, [0.0] * WIDTH)


def _all(kind: Any, number: int) -> Any:
    return ir.Constant(kind, [number] * WIDTH)


def _signed(context: Any, builder: Any, kind: Any, codes: Any, at: Any, bits: int) -> list[Any]:
    """Vectors of the codes in the 16 bytes at `at`: of 4 bits, of low halves and of high ones."""
    place = vector_at(context, builder, kind, codes, at, _BYTES)
    middle = 0x80 if bits == 8 else 0x88
    found = builder.xor(builder.load(place, align=1), _all(_BYTES, middle))
    whole = builder.sext(found, _INTS)
    parts = [whole]
    if bits == 4:
        low = builder.ashr(builder.shl(whole, _all(_INTS, 28)), _all(_INTS, 28))
        parts = [low, builder.ashr(whole, _all(_INTS, 4))]
    return [builder.sitofp(part, FLOATS) for part in parts]


@intrinsic  # type: ignore[untyped-decorator]
def scaled(
    context: Any, x: Any, at: Any, scale: Any, zero: Any, place: Any, count: Any, out: Any, to: Any
) -> Any:
    """out[to + i] = x[at + i] scale[place + i] for i < count; returns the sum of x zero.

    `count` is a multiple of 16.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        x, at, scale, zero, place, count, out, to = arguments
        total = cgutils.alloca_once_value(builder, _ZERO)

        def read(kind: Any, array: Any, index: Any) -> Any:
            return builder.load(vector_at(context, builder, kind, array, index), align=4)

        with cgutils.for_range_slice(builder, _INT(0), count, _INT(WIDTH), intp=_INT) as (i, _):
            number, of = read(kinds[0], x, builder.add(at, i)), builder.add(place, i)
            product = builder.fmul(number, read(kinds[2], scale, of))
            found = vector_at(context, builder, kinds[6], out, builder.add(to, i))
            builder.store(product, found, align=4)
            z = read(kinds[3], zero, of)
            builder.store(multiply_add(builder, number, z, builder.load(total)), total)
        empty = [_ZERO] * 3
        sums = sums_of_four(builder, [builder.load(total), *empty])
        return builder.extract_element(sums, ir.Constant(ir.IntType(32), 0))

    number = types.int64
    return types.float32(x, number, scale, zero, number, number, out, number), generate


def _each_kind(builder: Any, bits: Any, left: Any, emit: Callable[[int, int], None]) -> None:
    """The code that `emit` makes for 8 and 4 bits and each number of queries; `left` are left."""
    for width in (8, 4):
        with builder.if_then(builder.icmp_signed("==", bits, _INT(width))):
            for count in range(1, MOST + 1):
                holds = builder.icmp_signed("==" if count < MOST else ">=", left, _INT(count))
                with builder.if_then(holds):
                    emit(width, count)


@intrinsic  # type: ignore[untyped-decorator]
def dot_codes(
    context: Any,
    bits: Any,
    left: Any,
    query: Any,
    at: Any,
    stride: Any,
    codes: Any,
    code: Any,
    step: Any,
    dim: Any,
    base: Any,
    first: Any,
    out: Any,
    to: Any,
    width: Any,
) -> Any:
    """Logits of four rows of codes for `left` queries, `MOST` at most.

    out[to + j width + r] = base[first + j] + sum_c query[at + j stride + c] code_rc for queries j,
    rows r = 0, ..., 3 and channels c below `dim`; the codes of row r begin at byte `code` + r
    `step`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        bits, left, query, at, stride, codes, code, step, dim = arguments[:9]
        base, first, out, to, width = arguments[9:]
        data = context.make_array(kinds[9])(context, builder, base).data

        def rows_of(begin: Any, size: int, count: int) -> list[list[Any]]:
            # Two rows at a time: their sums stay in registers.
            sums = [
                [cgutils.alloca_once_value(builder, _ZERO) for _ in range(count)] for _ in range(2)
            ]
            rows = [begin, builder.add(begin, step)]
            half = dim if size == 8 else builder.lshr(dim, _INT(1))
            with cgutils.for_range_slice(builder, _INT(0), half, _INT(WIDTH), intp=_INT) as (c, _):
                read = [
                    _signed(context, builder, kinds[5], codes, builder.add(row, c), size)
                    for row in rows
                ]
                for j, part in itertools.product(range(count), range(8 // size)):
                    index = builder.add(builder.add(at, builder.mul(stride, _INT(j))), c)
                    place = builder.add(index, half) if part else index
                    found = vector_at(context, builder, kinds[2], query, place)
                    q = builder.load(found, align=4)
                    for own, numbers in zip(sums, read, strict=True):
                        total = multiply_add(builder, q, numbers[part], builder.load(own[j]))
                        builder.store(total, own[j])
            return [[builder.load(total) for total in own] for own in sums]

        def emit(size: int, count: int) -> None:
            sums = rows_of(code, size, count)
            sums += rows_of(builder.add(code, builder.mul(step, _INT(2))), size, count)
            for j in range(count):
                found = sums_of_four(builder, [row[j] for row in sums])
                start = builder.load(builder.gep(data, [builder.add(first, _INT(j))]))
                same = broadcast(builder, start)
                four = pick(builder, same, same, list(range(4)))
                index = builder.add(to, builder.mul(width, _INT(j)))
                place = vector_at(context, builder, kinds[11], out, index, found.type)
                builder.store(builder.fadd(found, four), place, align=4)

        _each_kind(builder, bits, left, emit)
        return context.get_dummy_value()

    number = types.int64
    given = (
        number, number, query, number, number, codes, number, number, number, base, number, out,
        number, number,
    )  # fmt: skip
    return types.void(*given), generate


@intrinsic  # type: ignore[untyped-decorator]
def mix_codes(
    context: Any,
    bits: Any,
    left: Any,
    weights: Any,
    one: Any,
    other: Any,
    stride: Any,
    codes: Any,
    code: Any,
    step: Any,
    rows: Any,
    out: Any,
    to: Any,
    apart: Any,
    width: Any,
) -> Any:
    """Add two vectors of values, in codes, to the outputs of `left` queries, `MOST` at most.

    out[to + j width + i] += sum_r weights[one + j stride + r] code_ri and out[to + apart + j width
    + i] += sum_r weights[other + j stride + r] code'_ri for queries j, `rows` rows r and i = 0,
    ..., 15. Of 8 bits the codes of row r are the 16 bytes from `code` + r `step` on and the 16
    after them, of 4 bits the low and the high halves of the first 16.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        bits, left, weights, one, other, stride, codes, code, step = arguments[:9]
        rows, out, to, apart, width = arguments[9:]
        data = context.make_array(kinds[2])(context, builder, weights).data

        def emit(size: int, count: int) -> None:
            places = []
            for j in range(count):
                index = builder.add(to, builder.mul(width, _INT(j)))
                places += [
                    vector_at(context, builder, kinds[10], out, x)
                    for x in (index, builder.add(index, apart))
                ]
            sums = [cgutils.alloca_once_value(builder, builder.load(x, align=4)) for x in places]
            with cgutils.for_range(builder, rows) as loop:
                at = builder.add(code, builder.mul(loop.index, step))
                read = _signed(context, builder, kinds[6], codes, at, size)
                if size == 8:
                    after = builder.add(at, _INT(WIDTH))
                    read += _signed(context, builder, kinds[6], codes, after, size)
                for n, total in enumerate(sums):
                    begin = builder.add((one, other)[n % 2], builder.mul(stride, _INT(n // 2)))
                    weight = builder.load(builder.gep(data, [builder.add(begin, loop.index)]))
                    w = broadcast(builder, weight)
                    added = multiply_add(builder, w, read[n % 2], builder.load(total))
                    builder.store(added, total)
            for place, total in zip(places, sums, strict=True):
                builder.store(builder.load(total), place, align=4)

        _each_kind(builder, bits, left, emit)
        return context.get_dummy_value()

    number = types.int64
    given = (
        number, number, weights, number, number, number, codes, number, number, number, out,
        number, number, number,
    )  # fmt: skip
    return types.void(*given), generate
