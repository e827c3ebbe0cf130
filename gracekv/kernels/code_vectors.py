"""Codes and 16-bit numbers to float32, 16 at a time, for compiled kernels.

Written as vector operations, which every processor has in some width: loops over the channels of
one head are too short for a compiler's own vector instructions. Indices count elements of
contiguous arrays.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped,unused-ignore]
from numba import types  # type: ignore[import-untyped,unused-ignore]
from numba.core import cgutils  # type: ignore[import-untyped,unused-ignore]
from numba.extending import intrinsic  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.row_vectors import FLOATS, WIDTH, broadcast, multiply_add, vector_at

_INTS = ir.VectorType(ir.IntType(32), WIDTH)
# A float16's exponent and mantissa bits in a float32 are a number 2^112 times too small.
_HALF_SCALE = 2.0**112


def _all(number: int, lanes: int = WIDTH) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), lanes), [number] * lanes)


def _wide(builder: Any, kind: Any, found: Any) -> Any:
    """Vectors of 16-bit integers, which stand for numbers of the array `kind`, as float32."""
    lanes = found.type.count
    number, ints = (ir.VectorType(x, lanes) for x in (ir.FloatType(), ir.IntType(32)))

    def constant(bits: int) -> Any:
        return _all(bits, lanes)

    bits = builder.zext(found, ints)
    if kind.dtype == types.uint16:
        return builder.bitcast(builder.shl(bits, constant(16)), number)
    small = builder.shl(builder.and_(bits, constant(0x7FFF)), constant(13))
    scale = ir.Constant(number, [_HALF_SCALE] * lanes)
    wide = builder.bitcast(builder.fmul(builder.bitcast(small, number), scale), ints)
    exponent = builder.and_(bits, constant(0x7C00))
    infinite = builder.icmp_unsigned("==", exponent, constant(0x7C00))
    wide = builder.or_(wide, builder.select(infinite, constant(0x7F800000), constant(0)))
    sign = builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
    return builder.bitcast(builder.or_(wide, sign), number)


def _widener(lanes: int) -> Any:
    def widen(context: Any, rows: Any, first: Any, out: Any, to: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds = signature.args
            rows, first, out, to = arguments
            half = ir.VectorType(ir.IntType(16), lanes)
            at = vector_at(context, builder, kinds[0], rows, first, half)
            found = _wide(builder, kinds[0], builder.load(at, align=2))
            place = vector_at(context, builder, kinds[2], out, to, found.type)
            builder.store(found, place, align=4)
            return context.get_dummy_value()

        return types.void(rows, types.int64, out, types.int64), generate

    return intrinsic(widen)


# out[to + i] = rows[first + i], of 16 numbers and of one: uint16 is bfloat16, int16 float16. Exact;
# see `as_float32`.
widen_vector, widen_one = _widener(WIDTH), _widener(1)


def _decoder(half: str, *, by_channel: bool) -> Any:
    def decode(
        context: Any,
        codes: Any,
        at: Any,
        step: Any,
        scale: Any,
        zero: Any,
        place: Any,
        stride: Any,
        out: Any,
        to: Any,
        width: Any,
        rows: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds = signature.args
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
                place_out = vector_at(context, builder, kinds[7], out, index)
                builder.store(numbers, place_out, align=4)
            return context.get_dummy_value()

        number = types.int64
        given = (codes, number, number, scale, zero, number, number, out, number, number, number)
        return types.void(*given), generate

    return intrinsic(decode)


# out[to + r width + i] = zero + scale * code for i = 0, ..., 15 and r below `rows`, the codes from
# the 16 bytes from `at` + r `step` on: whole bytes, their low halves or their high halves. Scale
# and zero point are 16 numbers from `place` on, the same for all rows ("channel"), or one number,
# at `place` + r `stride` ("token").
whole_by_channel = _decoder("whole", by_channel=True)
low_by_channel = _decoder("low", by_channel=True)
high_by_channel = _decoder("high", by_channel=True)
whole_by_token = _decoder("whole", by_channel=False)
low_by_token = _decoder("low", by_channel=False)
high_by_token = _decoder("high", by_channel=False)
