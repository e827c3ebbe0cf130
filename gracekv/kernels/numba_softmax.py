"""The softmax of a split, and the merge of splits, for the kernel of the `numba` backend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped,unused-ignore]

from gracekv.kernels.exponential import LEAST, exponential_parts
from gracekv.kernels.row_vectors import WIDTH, largest_of


@njit(nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def exponentials(x: Any, count: int, top: Any, bits: Any, power: Any) -> Any:
    """Sum of x <- e^(x - top), in place, for x <= top; `power` is `bits` (int32) as float32."""
    for e in range(count):
        y = max(x[e] - top, LEAST)
        mantissa, bits[e] = exponential_parts(y)
        # An entry that a bias of -inf hides has weight 0.
        x[e] = np.float32(0) if y == LEAST else mantissa
    total = np.float32(0)
    for e in range(count):
        x[e] *= power[e]
        total += x[e]
    return total


@njit(nogil=True)  # type: ignore[untyped-decorator]
def largest(x: Any, count: int) -> Any:
    """The largest of the first `count` numbers; any number or NaN if one is NaN."""
    vectors = count // WIDTH
    top = largest_of(x, vectors) if vectors > 0 else x[0]
    for e in range(vectors * WIDTH, count):
        top = max(top, x[e])
    return top


@njit(nogil=True)  # type: ignore[untyped-decorator]
def merge(
    partial: Any, slots: Any, count: int, output: Any, at: int, sink: float = -math.inf
) -> None:
    """output[at] from a query's `count` partial results; 0 if they hold no visible entry.

    `sink` is a logit to add to the denominator, -inf for none.
    """
    dim = output.shape[1]
    output[at] = np.float32(0)
    top = partial[slots[0], dim]
    for p in range(1, count):
        top = max(top, partial[slots[p], dim])
    if top == -math.inf:
        return
    total = np.float32(0)
    if sink > -math.inf:
        top = max(top, sink)
        total = np.float32(math.exp(sink - top))
    for p in range(count):
        factor = np.float32(math.exp(partial[slots[p], dim] - top))
        total += factor * partial[slots[p], dim + 1]
        for i in range(dim):
            output[at, i] += factor * partial[slots[p], i]
    for i in range(dim):
        output[at, i] /= total
