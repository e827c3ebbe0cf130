"""e^x of float32 numbers in loops that a compiler turns into vector instructions.

With the mathematical library's exponential instead, trees take 9 to 16 % more CPU time, and the
log-sum-exp 4 times as much (`benchmarks/results/numba_kernels.md`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

LEAST = np.float32(-87.0)
"""Smaller exponents are taken as this one: e^-87 is the smallest power that a float32 holds."""

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts, so that x - n ln 2 keeps its digits.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


@njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def exponential_parts(x: Any) -> Any:
    """m and the bits (int32) of a power of two p with e^x = m p, for float32 `LEAST` <= x <= 87.

    A loop that stores both and a loop that multiplies them become vector instructions; one loop
    does not.
    """
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    s = np.float32(1.9875691500e-4)
    s = s * r + np.float32(1.3981999507e-3)
    s = s * r + np.float32(8.3334519073e-3)
    s = s * r + np.float32(4.1665795894e-2)
    s = s * r + np.float32(1.6666665459e-1)
    s = s * r + np.float32(5.0000001201e-1)
    return s * r * r + r + np.float32(1.0), (np.int32(n) + np.int32(127)) << np.int32(23)


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def exponentiate(x: Any, bits: Any, power: Any) -> None:
    """x <- e^x in place for float32 x <= 87; e^-87 below -87.

    `bits` (int32, as long as x) is overwritten; `power` is `bits` seen as float32.
    """
    for q in range(len(x)):
        x[q], bits[q] = exponential_parts(max(x[q], LEAST))
    for q in range(len(x)):
        x[q] *= power[q]
