"""Capped logits in loops that a compiler turns into vector instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.exponential import exponential_parts

# From here on tanh is 1 in float32.
_FAR = np.float32(20)
# Below it, the quotient of exponentials would cancel.
_NEAR = np.float32(0.625)


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def cap_logits(x: Any, count: int, softcap: Any, mantissa: Any, bits: Any, power: Any) -> None:
    """x <- softcap tanh(x / softcap) of the first `count` float32 numbers, in place.

    To float32's last bits (Cephes' tanhf); NaN stays NaN. `mantissa` (float32) and `bits` (int32)
    are overwritten; `power` is `bits` as float32.
    """
    one, two, inverse = np.float32(1), np.float32(2), np.float32(1) / softcap
    for e in range(count):
        mantissa[e], bits[e] = exponential_parts(two * min(abs(x[e] * inverse), _FAR))
    for e in range(count):
        r = x[e] * inverse
        far = one - two / (mantissa[e] * power[e] + one)
        square = r * r
        p = np.float32(-5.70498872745e-3) * square + np.float32(2.06390887954e-2)
        p = p * square - np.float32(5.37397155531e-2)
        p = p * square + np.float32(1.33314422036e-1)
        p = p * square - np.float32(3.33332819422e-1)
        near = p * square * r + r
        signed = -far if r < np.float32(0) else far
        x[e] = softcap * (signed if abs(r) >= _NEAR else near)
