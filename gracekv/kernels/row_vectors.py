"""Products of rows of float32 numbers, 16 at a time, for compiled kernels.

Written as vector operations, which every processor has in some width: over the channels of one
head, a compiler's own vector code spends most of its time on sums across a vector and on storing
values that the next round loads again. Indices count elements of contiguous arrays.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped,unused-ignore]
from numba import types  # type: ignore[import-untyped,unused-ignore]
from numba.core import cgutils  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.intrinsics import emitted

WIDTH = 16
"""Elements per vector; dimensions are multiples of it."""
BLOCK = 64
"""Number of channels of `add_block`."""

FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
"""A vector."""

_INT = ir.IntType(64)
_NUMBER = types.int64


def vector_at(
    context: Any, builder: Any, array: Any, value: Any, index: Any, kind: Any = FLOATS
) -> Any:
    """A pointer to a vector at element `index` of a contiguous array."""
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def broadcast(builder: Any, number: Any) -> Any:
    """16 times `number`."""
    none = ir.Constant(ir.VectorType(number.type, WIDTH), ir.Undefined)
    first, same = ir.IntType(32)(0), ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(builder.insert_element(none, number, first), none, same)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once if the processor supports it."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def pick(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """The elements at `lanes` of the concatenated `a` and `b`."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(a, b, mask)


def sums_of_four(builder: Any, vectors: list[Any]) -> Any:
    """<4 x float>: the sums of four <16 x float>."""
    low, high = list(range(8)), list(range(8, 16))
    sums = [builder.fadd(pick(builder, v, v, low), pick(builder, v, v, high)) for v in vectors]
    # Neighbours are added within quarters, so that no element crosses a 128-bit lane.
    even, odd = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [builder.fadd(pick(builder, a, b, even), pick(builder, a, b, odd)) for a, b in pairs]
    (last,) = sums
    return builder.fadd(pick(builder, last, last, low[:4]), pick(builder, last, last, low[4:]))


@emitted(types.void, None, _NUMBER, None, _NUMBER, _NUMBER, None, _NUMBER)
def dot_four(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """out[to + r] = sum_i queries[query + i] keys[key + r dim + i] for r = 0, ..., 3."""
    queries, query, keys, key, dim, out, to = arguments
    zero = ir.Constant(FLOATS, [0.0] * WIDTH)
    sums = [cgutils.alloca_once_value(builder, zero) for _ in range(4)]
    with cgutils.for_range_slice(builder, _INT(0), dim, _INT(WIDTH), intp=_INT) as (i, _):
        at = vector_at(context, builder, kinds[0], queries, builder.add(query, i))
        q, row = builder.load(at, align=4), builder.add(key, i)
        for total in sums:
            at = vector_at(context, builder, kinds[2], keys, row)
            k = builder.load(at, align=4)
            builder.store(multiply_add(builder, q, k, builder.load(total)), total)
            row = builder.add(row, dim)
    four = sums_of_four(builder, [builder.load(total) for total in sums])
    builder.store(four, vector_at(context, builder, kinds[5], out, to, four.type), align=4)


@emitted(types.float32, None, _NUMBER)
def largest_of(context: Any, builder: Any, kinds: Any, x: Any, vectors: Any) -> Any:
    """The largest of the first 16 `vectors` numbers, `vectors` > 0; undefined if one is NaN."""

    def larger(a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", b, a), b, a)

    first = vector_at(context, builder, kinds[0], x, _INT(0))
    top = cgutils.alloca_once_value(builder, builder.load(first, align=4))
    with cgutils.for_range(builder, vectors) as loop:
        at = vector_at(context, builder, kinds[0], x, builder.mul(loop.index, _INT(WIDTH)))
        builder.store(larger(builder.load(top), builder.load(at, align=4)), top)
    vector, lanes = builder.load(top), WIDTH
    while lanes > 1:
        lanes //= 2
        low, high = list(range(lanes)), list(range(lanes, 2 * lanes))
        vector = larger(pick(builder, vector, vector, low), pick(builder, vector, vector, high))
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _adder(channels: int) -> Any:
    @emitted(types.void, None, _NUMBER, None, _NUMBER, _NUMBER, _NUMBER, None, _NUMBER)
    def add(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        weights, weight, values, value, dim, rows, out, to = arguments
        steps = [_INT(c) for c in range(0, channels, WIDTH)]
        places = [vector_at(context, builder, kinds[6], out, builder.add(to, c)) for c in steps]
        sums = [cgutils.alloca_once_value(builder, builder.load(at, align=4)) for at in places]
        data = context.make_array(kinds[0])(context, builder, weights).data
        with cgutils.for_range(builder, rows) as loop:
            at = builder.gep(data, [builder.add(weight, loop.index)])
            w = broadcast(builder, builder.load(at))
            row = builder.add(value, builder.mul(loop.index, dim))
            for c, total in zip(steps, sums, strict=True):
                at = vector_at(context, builder, kinds[2], values, builder.add(row, c))
                v = builder.load(at, align=4)
                builder.store(multiply_add(builder, w, v, builder.load(total)), total)
        for place, total in zip(places, sums, strict=True):
            builder.store(builder.load(total), place, align=4)

    return add


# out[to + i] += sum_r weights[weight + r] values[value + r dim + i] over `rows` rows, for i below
# 64 and below 16.
add_block, add_vector = _adder(BLOCK), _adder(WIDTH)
