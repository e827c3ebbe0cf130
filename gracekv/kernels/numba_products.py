"""The two products of attention, for the kernel of the `numba` backend.

They are written by hand because torch has no kernel for ragged heads: `Sdpa`, which reads the same
entries through torch's fused attention, takes twice as long (benchmarks/results/decode.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gracekv.kernels.intrinsics import inner, prefetch
from gracekv.kernels.row_vectors import BLOCK, WIDTH, add_block, add_vector, dot_four

# Number of keys to prefetch in a split: a thread's first split has no predecessor that does so.
_PREFETCH_KEYS = 12
# Values per round: sums stay in registers, and memory reads are spread out.
_ROUND = 16


@inner(fastmath={"reassoc", "contract"})
def products(
    queries: Any, count: int, keys: Any, first: int, entries: int, ahead: Any, at: int, out: Any,
    to: int = 0,
) -> None:  # fmt: skip
    """out[j, to + e] = q_j . k_e, four keys per round; prefetches rows of `ahead` from `at`."""
    dim = keys.shape[1]
    e = 0
    while dim % WIDTH == 0 and e + 4 <= entries:
        prefetch(ahead, at + e, 4)
        prefetch(keys, first + e + _PREFETCH_KEYS, 4)
        r = first + e
        for j in range(count):
            p = j * out.shape[1] + to + e
            dot_four(queries, j * queries.shape[1], keys, r * dim, dim, out, p)
        e += 4
    prefetch(ahead, at + e, entries - e)
    while e < entries:
        for j in range(count):
            t0 = np.float32(0)
            for i in range(dim):
                t0 += queries[j, i] * keys[first + e, i]
            out[j, to + e] = t0
        e += 1


@inner(fastmath={"contract"})
def mixtures(
    weights: Any, count: int, values: Any, first: int, entries: int, ahead: Any, at: int, out: Any,
    start: int = 0,
) -> None:  # fmt: skip
    """out[j, :d] = sum_e w_je v_e, a few values per round; prefetches rows of `ahead` from `at`.

    Uses the weights from `start` on; if that is not 0, the sum is added to `out`.
    """
    dim = values.shape[1]
    width, step = out.shape[1], weights.shape[1]
    if start == 0:
        out[:count, :dim] = np.float32(0)
    for e in range(0, entries, _ROUND):
        rows = min(_ROUND, entries - e)
        prefetch(ahead, at + e, rows)
        for j in range(count):
            w, v = j * step + start + e, (first + e) * dim
            if dim % WIDTH == 0:
                for c in range(0, dim - BLOCK + 1, BLOCK):
                    add_block(weights, w, values, v + c, dim, rows, out, j * width + c)
                for c in range(dim // BLOCK * BLOCK, dim, WIDTH):
                    add_vector(weights, w, values, v + c, dim, rows, out, j * width + c)
            else:
                for r in range(rows):
                    for i in range(dim):
                        out[j, i] += weights[j, start + e + r] * values[first + e + r, i]
