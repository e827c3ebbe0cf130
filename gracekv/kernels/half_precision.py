"""Half-precision numbers for compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types  # type: ignore[import-untyped,unused-ignore]
from numba.extending import overload  # type: ignore[import-untyped,unused-ignore]

# A float16's exponent and mantissa bits in a float32 are a number 2^112 times too small.
_HALF_SCALE = np.float32(2.0**112)


def as_float32(rows: Any, first: int, count: int, wide: Any) -> Any:
    """`count` rows from `first` as float32: the array that holds them, and the first one's index.

    numba has no half-precision numbers: rows of uint16 are bfloat16, rows of int16 float16. They
    are converted exactly into `wide` [count or more, d] float32; float32 rows stay where they are.
    """
    raise NotImplementedError("Only compiled code can call this; see `_typed`.")


@overload(as_float32)  # type: ignore[untyped-decorator]
def _typed(rows: Any, first: Any, count: Any, wide: Any) -> Any:
    def same(rows: Any, first: Any, count: Any, wide: Any) -> Any:
        return rows, first

    def bfloat16(rows: Any, first: Any, count: Any, wide: Any) -> Any:
        bits = wide.view(np.uint32)
        for e in range(count):
            for i in range(rows.shape[1]):
                bits[e, i] = np.uint32(rows[first + e, i]) << np.uint32(16)
        return wide, 0

    def float16(rows: Any, first: Any, count: Any, wide: Any) -> Any:
        bits = wide.view(np.uint32)
        for e in range(count):
            for i in range(rows.shape[1]):
                bits[e, i] = (np.uint32(rows[first + e, i]) & np.uint32(0x7FFF)) << np.uint32(13)
            for i in range(rows.shape[1]):
                wide[e, i] *= _HALF_SCALE
            for i in range(rows.shape[1]):
                x = np.uint32(rows[first + e, i])
                infinite = (x & np.uint32(0x7C00)) == np.uint32(0x7C00)
                sign = (x & np.uint32(0x8000)) << np.uint32(16)
                bits[e, i] |= sign | (np.uint32(0x7F800000) if infinite else np.uint32(0))
        return wide, 0

    return {types.float32: same, types.uint16: bfloat16, types.int16: float16}[rows.dtype]
