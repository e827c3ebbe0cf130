"""The two products of attention, for the kernel of the `numba` backend.

They are written out because torch has no kernel for ragged heads: `Sdpa`, which reads the same
entries through torch's fused attention, takes twice as long (benchmarks/results/decode.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.intrinsics import prefetch

# Keys to prefetch in a split: the first one of a thread has no predecessor that does so.
_PREFETCH_KEYS = 12


@njit(nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def products(
    queries: Any, count: int, keys: Any, first: int, entries: int, ahead: Any, at: int, out: Any
) -> None:
    """out[j, e] = q_j . k_e, four keys a round; prefetches rows of `ahead` from `at`."""
    dim = keys.shape[1]
    e = 0
    while e + 4 <= entries:
        prefetch(ahead, at + e, 4)
        prefetch(keys, first + e + _PREFETCH_KEYS, 4)
        r = first + e
        for j in range(count):
            t0, t1, t2, t3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(dim):
                x = queries[j, i]
                t0 += x * keys[r, i]
                t1 += x * keys[r + 1, i]
                t2 += x * keys[r + 2, i]
                t3 += x * keys[r + 3, i]
            out[j, e], out[j, e + 1], out[j, e + 2], out[j, e + 3] = t0, t1, t2, t3
        e += 4
    prefetch(ahead, at + e, entries - e)
    while e < entries:
        for j in range(count):
            t0 = np.float32(0)
            for i in range(dim):
                t0 += queries[j, i] * keys[first + e, i]
            out[j, e] = t0
        e += 1


@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def mixtures(
    weights: Any, count: int, values: Any, first: int, entries: int, ahead: Any, at: int, out: Any
) -> None:
    """out[j, :d] = sum_e w_je v_e, four values a round; prefetches rows of `ahead` from `at`."""
    dim = values.shape[1]
    out[:count, :dim] = np.float32(0)
    e = 0
    while e + 4 <= entries:
        prefetch(ahead, at + e, 4)
        r = first + e
        for j in range(count):
            w0, w1, w2, w3 = weights[j, e], weights[j, e + 1], weights[j, e + 2], weights[j, e + 3]
            for i in range(dim):
                out[j, i] += (
                    w0 * values[r, i]
                    + w1 * values[r + 1, i]
                    + w2 * values[r + 2, i]
                    + w3 * values[r + 3, i]
                )
        e += 4
    while e < entries:
        for j in range(count):
            for i in range(dim):
                out[j, i] += weights[j, e] * values[first + e, i]
        e += 1
