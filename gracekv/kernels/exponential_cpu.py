"""e^x of float32 numbers in loops that a compiler turns into vector instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts, so that x - n ln 2 keeps its digits.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LEAST = np.float32(-87.0)


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def exponential(x: Any, bits: Any, power: Any) -> None:
    """x <- e^x in place for float32 x <= 87; what lies below -87 becomes e^-87.

    `bits` (int32, as long as x) is used up; `power` is `bits` seen as float32.
    """
    for q in range(len(x)):
        y = max(x[q], _LEAST)
        n = np.floor(y * _LOG2_E + np.float32(0.5))
        r = y - n * _LN2_HIGH - n * _LN2_LOW
        s = np.float32(1.9875691500e-4)
        s = s * r + np.float32(1.3981999507e-3)
        s = s * r + np.float32(8.3334519073e-3)
        s = s * r + np.float32(4.1665795894e-2)
        s = s * r + np.float32(1.6666665459e-1)
        s = s * r + np.float32(5.0000001201e-1)
        x[q] = s * r * r + r + np.float32(1.0)
        bits[q] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for q in range(len(x)):
        x[q] *= power[q]
