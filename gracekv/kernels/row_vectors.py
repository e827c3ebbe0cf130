"""Weighted sums of rows of float32 numbers, 16 at a time, for compiled kernels.

Written as vector operations, which every processor has in some width: a compiler's own spend a
fifth of their time on stores of what the next round loads again. Indices count numbers of
contiguous arrays.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped,unused-ignore]
from numba import types  # type: ignore[import-untyped,unused-ignore]
from numba.core import cgutils  # type: ignore[import-untyped,unused-ignore]
from numba.extending import intrinsic  # type: ignore[import-untyped,unused-ignore]

WIDTH = 16
"""Numbers of a vector; dimensions are multiples of it."""
BLOCK = 64
"""Channels of `add_block`."""

FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
"""A vector."""

_INT = ir.IntType(64)


def vector_at(
    context: Any, builder: Any, array: Any, value: Any, index: Any, kind: Any = FLOATS
) -> Any:
    """A pointer to a vector at element `index` of a contiguous array."""
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def broadcast(builder: Any, number: Any) -> Any:
    """<16 x float>, all of them `number`."""
    none, first = ir.Constant(FLOATS, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    same = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(builder.insert_element(none, number, first), none, same)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the processor can."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _adder(channels: int) -> Any:
    def add(
        context: Any,
        weights: Any,
        weight: Any,
        values: Any,
        value: Any,
        dim: Any,
        rows: Any,
        out: Any,
        to: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds = signature.args
            weights, weight, values, value, dim, rows, out, to = arguments
            offsets = [_INT(c) for c in range(0, channels, WIDTH)]
            places = [
                vector_at(context, builder, kinds[6], out, builder.add(to, c)) for c in offsets
            ]
            sums = [
                cgutils.alloca_once_value(builder, builder.load(place, align=4)) for place in places
            ]
            data = context.make_array(kinds[0])(context, builder, weights).data
            with cgutils.for_range(builder, rows) as loop:
                w = broadcast(
                    builder, builder.load(builder.gep(data, [builder.add(weight, loop.index)]))
                )
                row = builder.add(value, builder.mul(loop.index, dim))
                for c, total in zip(offsets, sums, strict=True):
                    at = vector_at(context, builder, kinds[2], values, builder.add(row, c))
                    v = builder.load(at, align=4)
                    builder.store(multiply_add(builder, w, v, builder.load(total)), total)
            for place, total in zip(places, sums, strict=True):
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        number = types.int64
        given = (weights, number, values, number, number, number, out, number)
        return types.void(*given), generate

    return intrinsic(add)


# out[to + i] += sum_r weights[weight + r] values[value + r dim + i] over `rows` rows, for i below
# 64 and below 16.
add_block, add_vector = _adder(BLOCK), _adder(WIDTH)
