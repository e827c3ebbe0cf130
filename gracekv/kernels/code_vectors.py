"""Codes to float32, 16 at a time, for compiled kernels.

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


def _all(number: int, lanes: int = WIDTH) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), lanes), [number] * lanes)


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
